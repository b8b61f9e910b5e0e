"""Every program of benchmarks/ is imported, and most run their checks on sizes so small that no
figure of theirs means anything (`benchmarks/_peers/tiny.py`).
"""

from __future__ import annotations

import fcntl
import gc
import multiprocessing
import os
import runpy
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import evidence
from benchmarks.evidence import PROGRAMS
from sparrow.kernels import missing

pytestmark = pytest.mark.multi

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
# Imported alone: what a tiny form would not be cheap for, with what it would take.
IMPORTED = {
    "before_after": "two checkouts",
    "busy": "loops that keep all cores busy",
    "dedup_exchange": "a cluster in a box",
    "dedup_prepare": "processes of its own",
    "engines": "processes of its own",
    "first_hours": "real logs",
    "models": "processes of its own",
    "models_vs_fuxictr": "FuxiCTR",
    "prepare_memory": "a control group",
    "readers": "processes of its own",
    "real_data": "real logs",
    "serve": "services",
    "sharded": "a cluster in a box",
    "tables_budget": "16 CPU-seconds of trainings",
    "tiers": "minutes",
    "vs_fuxictr": "FuxiCTR",
    "vs_torchrec": "torchrec",
    "vs_torchrec_box": "torchrec",
    "vs_trees": "processes of its own",
}
# Where `--quick` of PROGRAMS has more than a tiny run needs.
ARGUMENTS = {
    "gpu": ["--device", "cpu"],
    "meaning": ["--only", "mails"],
    "exchange_overhead": ["--quick", "--ranks", "16", "--local", "4"],
    "number_formats_rows": ["--quick", "--cases", "rows"],
    "numerics": ["--quick", "--cases", "inputs", "cost", "dispatch"],
    "precision_quality": ["--quick", "--models", "dcnv2", "--cases", "cast"],
}


def run_in_child(path: Path, arguments: list[str], output: Path, name: str) -> None:
    """Be the program, with everything that it prints in a file."""
    file = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ["SPARROW_TINY"] = "1"
    import torch

    torch.set_num_threads(1)
    gc.freeze()  # what was imported is never collected
    sys.argv, sys.path[:0] = [str(path), *arguments], [str(path.parent), str(BENCHMARKS)]
    runpy.run_path(str(path), run_name=name)


def ended(path: Path, arguments: list[str], folder: Path, name: str = "__main__") -> str:
    """Returns what a program printed; it fails the test if the program fails."""
    context = multiprocessing.get_context("forkserver")  # see tests/conftest.py
    process = context.Process(target=run_in_child, args=(path, arguments, folder / "output", name))
    process.start()
    process.join()
    text = (folder / "output").read_text()
    assert process.exitcode == 0, text
    return text


def test_every_program_is_in_the_table() -> None:
    has_main = [path.stem for path in BENCHMARKS.glob("*.py") if "__main__" in path.read_text()]
    assert {*PROGRAMS, "evidence", "open_loop", "serve_peers"} == {*has_main}
    assert {*IMPORTED} < {*PROGRAMS}


@pytest.mark.skipif(bool(missing()), reason=f"kernels are not compiled: {missing()}")
@pytest.mark.parametrize("name", sorted({*PROGRAMS} - {*IMPORTED}))
def test_a_program_runs(name: str, tmp_path: Path) -> None:
    arguments = ARGUMENTS.get(name, shlex.split(PROGRAMS[name]))
    ended(BENCHMARKS / f"{name}.py", arguments, tmp_path)


MODULES = sorted(
    path
    for path in BENCHMARKS.rglob("*.py")
    if path.parent.name != "meaning_logs" and path.stem not in {*PROGRAMS} - {*IMPORTED}
)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_a_program_is_imported(path: Path, tmp_path: Path) -> None:
    try:
        ended(path, [], tmp_path, name="imported")
    except AssertionError as error:
        missing = "ModuleNotFoundError: No module named '"
        name = str(error).rpartition(missing)[2].partition("'")[0]
        if missing not in str(error) or name.startswith(("sparrow", "benchmarks", "_peers")):
            raise
        pytest.skip(f"{name} is not installed")


# -- the page of evidence --------------------------------------------------------------------------

TOYS = {
    "good": "from _peers.targets import print_target\nprint_target('rows/s', '2.10', 2, True)\n"
    "print_target('bytes', '7 | 8', None, None)\nprint('ran', file=open('log', 'a'))",
    "lacking": "import sys; sys.exit('torchrec is not installed here')",
    "broken": "import sys; sys.exit(None.state)",
    "endless": "import fcntl, os, time\nfile = open('lock', 'w')\nfcntl.flock(file, fcntl.LOCK_EX)\n"
    "os.fork()\nopen('forked', 'w').close()\ntime.sleep(600)",
}


class Timed(subprocess.Popen[str]):
    """A process to which time passes only when it has come to what never ends."""

    def communicate(self, input: str | None = None, timeout: float | None = None) -> Any:
        if not str(self.args[3]).endswith("endless.py"):  # type: ignore[index]
            return super().communicate(input)
        while not Path("forked").exists():
            assert self.poll() is None
            time.sleep(0.01)
        return super().communicate(input, timeout=0.01)


def test_the_page_of_evidence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "_peers").mkdir()
    shutil.copy(BENCHMARKS / "_peers" / "targets.py", tmp_path / "_peers")
    for name, text in TOYS.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    changes = {"HERE": tmp_path, "RESULTS": tmp_path / "r", "PAGE": tmp_path / "page"}
    changes |= {"PROGRAMS": dict.fromkeys(TOYS, ""), "commit": lambda: "abc", "LIMIT_S": 3}
    for name, value in changes.items():
        monkeypatch.setattr(evidence, name, value)
    monkeypatch.setattr(sys, "argv", ["evidence.py"])
    monkeypatch.setattr(subprocess, "Popen", Timed)
    evidence.main()
    page = (tmp_path / "page").read_text()
    assert "1 of 1 figures meet their goal" in page
    assert "| `good.py` | rows/s | 2 | 2.10 | met |" in page
    assert "| `good.py` | bytes |  | 7 / 8 |  |" in page
    assert "| `lacking.py` | not run: torchrec is not installed here |" in page
    assert "| `broken.py` | failed: AttributeError: 'NoneType' object has no attribute" in page
    assert "| `endless.py` | failed: took more than 3 s |" in page
    with (tmp_path / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the process that it began has ended too
    evidence.main()  # all is there already
    assert (tmp_path / "log").read_text() == "ran\n"
    assert (tmp_path / "page").read_text() == page
    monkeypatch.setattr(evidence, "commit", lambda: "def")
    evidence.main()
    assert (tmp_path / "log").read_text() == "ran\nran\n"
    assert "abc" not in (tmp_path / "page").read_text()
