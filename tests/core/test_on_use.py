"""Files of a package that are loaded when they are first used."""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest


def test_a_file_is_loaded_when_it_is_first_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "seldom"
    folder.mkdir()
    text = (
        "from sparrow.core.on_use import loaded_on_use\n__getattr__ = loaded_on_use(__name__,"
        " ['rare'])\n"
    )
    (folder / "__init__.py").write_text(text)
    (folder / "rare.py").write_text("answer = 42\n")
    (folder / "other.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    seldom = importlib.import_module("seldom")
    assert "seldom.rare" not in sys.modules
    assert seldom.rare.answer == 42
    assert seldom.rare is sys.modules["seldom.rare"]
    with pytest.raises(AttributeError, match=r"module 'seldom' has no attribute 'other'"):
        seldom.other  # noqa: B018  only to be looked for


def test_a_function_loads_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "sparse"
    folder.mkdir()
    names = "(), {'double': 'rare'}"
    text = (
        "from sparrow.core.on_use import loaded_on_use\n__getattr__ = loaded_on_use(__name__,"
        f" {names})\n"
    )
    (folder / "__init__.py").write_text(text)
    (folder / "rare.py").write_text("def double(x):\n    return 2 * x\n")
    monkeypatch.syspath_prepend(tmp_path)
    sparse = importlib.import_module("sparse")
    assert "sparse.rare" not in sys.modules
    assert sparse.double(21) == 42
    with pytest.raises(AttributeError, match=r"module 'sparse' has no attribute 'half'"):
        sparse.half  # noqa: B018  only to be looked for


@pytest.mark.parametrize("package", ["sparrow.metrics", "sparrow.analysis.picture"])
def test_each_function_that_is_loaded_on_use_is_there(package: str) -> None:
    module = importlib.import_module(package)
    tree = ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))
    blocks = [node for node in tree.body if isinstance(node, ast.If)]
    names = [alias.name for block in blocks for line in block.body for alias in line.names]
    assert names
    assert all(callable(getattr(module, name)) for name in names)


PACKAGES = (
    *(
        "sparrow.data.batches",
        "sparrow.data.logs",
        "sparrow.data.meaning",
        "sparrow.data.preparation",
    ),
    *("sparrow.data.shaping", "sparrow.features"),
)
PREPARE = """
import json, sys
from sparrow import cli
sys.argv = ["sparrow", "prepare", *sys.argv[1:]]
try:
    cli.main()
except SystemExit as end:
    assert not end.code
print(json.dumps(sorted(sys.modules)), file=sys.__stdout__)
"""


def loaded(folder: Path, header: str, row: str, *flags: str) -> set[str]:
    """Prepare a log of 200 rows in a process of its own. Returns which files that are loaded on use
    it loads.
    """
    log = folder / "log.csv"
    rows = [row.format(label=int(i % 7 == 0), user=i % 11, x=i / 10) for i in range(200)]
    log.write_text("\n".join([header, *rows]) + "\n")
    command = [sys.executable, "-c", PREPARE, str(log), "--out", str(folder / "data"), *flags]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    modules = set(json.loads(run.stdout.splitlines()[-1]))
    files = {
        f"{package}.{name}"
        for package in PACKAGES
        for name in importlib.import_module(package).__all__
    }
    return files & modules


def test_a_plain_log_loads_none(tmp_path: Path) -> None:
    assert loaded(tmp_path, "label,user,price", "{label},{user},{x}") == set()


def test_a_log_loads_what_it_needs(tmp_path: Path) -> None:
    (tmp_path / "users.csv").write_text(
        "user,age\n" + "".join(f"{i},{20 + i}\n" for i in range(11))
    )
    files = loaded(
        tmp_path,
        "label,user,v",
        "{label},{user},{x} 0.5 1.5 2.5",
        "--join",
        str(tmp_path / "users.csv"),
        "--on",
        "user",
    )
    shaping = {f"sparrow.data.shaping.{name}" for name in ("candidates", "conversion", "joins")}
    meaning = {f"sparrow.data.meaning.{name}" for name in ("lists", "requests", "times", "vectors")}
    features = {f"sparrow.features.{name}" for name in ("lists", "times", "vectors")}
    assert files == shaping | meaning | features  # text may be a list or a time, so it is looked at


def test_lists_and_times_load_what_reads_them(tmp_path: Path) -> None:
    header, row = "label,user,ts,seen_items", "{label},{user},2026-11-21 10:00:{user:02},{user}|3|5"
    files = loaded(tmp_path, header, row, "--split", "time")
    meaning = {f"sparrow.data.meaning.{name}" for name in ("lists", "times")}
    features = {f"sparrow.features.{name}" for name in ("lists", "quantile", "times")}
    assert files >= meaning | features | {"sparrow.data.preparation.cuts"}
    assert not files & {
        "sparrow.data.meaning.texts",
        "sparrow.features.crosses",
        "sparrow.features.runs",
    }
