"""Settings of a preparation are spelt once, and an engine is an extension's."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import sparrow.extensions
from sparrow import data
from sparrow.cli import main
from sparrow.core import UserError
from sparrow.core.extensions import extensions
from sparrow.data.preparation.settings import Settings, engine_settings

SPARROW = Path(sparrow.extensions.__file__).parents[1]
INIT = """
from sparrow.core.extensions import Extension

EXTENSION = Extension(engine="go through the rows of `out` twice: where, such as a", calls_back=False)
"""
ENGINE = """
from concurrent.futures import ThreadPoolExecutor

from sparrow.data.preparation.engine import Local

PLACES = []


class Twice(Local):
    def read(self):
        super().read()
        ends = self.ends
        super().read()
        assert self.ends == ends


def open_engine(place, schema, logs, work, progress):
    PLACES.append(place)
    return Twice(schema, logs, work, progress, ThreadPoolExecutor(1))
"""


@pytest.fixture
def twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An extension that stands elsewhere, with an engine."""
    folder = tmp_path / "more" / "twice"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(INIT)
    (folder / "engine.py").write_text(ENGINE)
    monkeypatch.setattr(
        sparrow.extensions, "__path__", [*sparrow.extensions.__path__, str(folder.parent)]
    )
    extensions.cache_clear()
    yield
    extensions.cache_clear()
    for name in [name for name in sys.modules if name.startswith("sparrow.extensions.twice")]:
        del sys.modules[name]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    rows = {
        "label": [int(i % 3 == 0) for i in range(300)],
        "ts": [i * 37 % 300 for i in range(300)],
        "user": [f"u{i % 7}" for i in range(300)],
    }
    pq.write_table(pa.table(rows), tmp_path / "log.parquet")
    return tmp_path / "log.parquet"


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file()
    }


def test_every_setting_is_an_argument_with_its_default() -> None:
    shown = inspect.signature(data.prepare).parameters
    assert set(shown) == {
        *("inputs", "out", "schema", "label", "impressions", "outcomes", "split", "source"),
        *("grow", "overwrite", "progress", "ray"),
    }
    for group in (Settings, engine_settings()):
        for field in fields(group):
            assert shown[field.name].default == field.default, field.name
            assert shown[field.name].kind is inspect.Parameter.KEYWORD_ONLY
    with pytest.raises(TypeError, match="'labels'"):
        data.prepare(["log.csv"], "out", labels="click")


def test_the_preparation_names_no_engine_of_an_extension() -> None:
    names = "|".join(field.name for field in fields(engine_settings()))
    assert names == "ray"
    sources = [*(SPARROW / "data").rglob("*.py"), SPARROW / "cli" / "prepare.py"]
    assert len(sources) > 50
    assert not [
        path.name for path in sources if re.search(rf"\b(on_)?({names})\b", path.read_text(), re.I)
    ]


@pytest.mark.usefixtures("twice")
def test_an_extension_brings_an_engine_and_its_flag(
    tmp_path: Path, log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data.prepare([log], tmp_path / "usual")
    data.prepare([log], tmp_path / "keyword", twice="a")
    command = ["prepare", str(log), "--out", str(tmp_path / "flag"), "--twice"]
    assert main([*command, "b"]) == 0
    engine = sys.modules["sparrow.extensions.twice.engine"]
    assert vars(engine)["PLACES"] == ["a", "b"]
    assert bytes_of(tmp_path / "usual") == bytes_of(tmp_path / "keyword")
    assert bytes_of(tmp_path / "usual") == bytes_of(tmp_path / "flag")
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(["prepare", "--help"])
    text = " ".join(re.sub(r"[│╭╮╰╯─]", " ", capsys.readouterr().out).split())
    assert "Go through the rows of --out twice: where, such as a (default: None)" in text


@pytest.mark.usefixtures("twice")
def test_one_engine_alone_goes_through_the_rows(
    tmp_path: Path, log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message = "ray, twice: one alone can go through the rows; leave the others out"
    with pytest.raises(UserError, match=f"^{message}$"):
        data.prepare([log], tmp_path / "out", twice="a", ray="local")
    command = ["prepare", str(log), "--out", str(tmp_path / "out"), "--twice", "a", "--ray", "b"]
    assert main(command) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.multi
def test_help_and_front_page_load_no_engine() -> None:
    program = "import sys\nfrom sparrow import data\ndata.prepare\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    names = set(done.stdout.split())
    assert "sparrow.extensions.ray" in names
    assert not {"sparrow.extensions.ray.engine", "sparrow.extensions.ray.cluster", "ray"} & names
