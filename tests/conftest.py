from __future__ import annotations

import gc
import multiprocessing
import os
import random
import sys
from pathlib import Path
from typing import Any

# A thread that waits for others sleeps, and leaves its core to the test beside it. torch reads this
# when it is imported; told too late, tests on a busy machine take up to seven times as long.
assert "torch" not in sys.modules
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import pytest
import torch
from hypothesis import settings

from sparrow import data
from sparrow.apps.generate import generate

pytest.register_assert_rewrite("tests.kernels.embedding_bag.cases")  # before any test imports it

# A process has one server of forks, and who asks first starts it: it imports what any test's
# processes need, and this file for what is set here. Elsewhere each process would import torch.
PRELOADED = [
    "tests.conftest",
    "tests.equivalence.cases",
    "torch._dynamo",
    "pyarrow.parquet",
    "pandas",
]
PRELOADED += ["sparrow.training", "sparrow.data.preparation", "sparrow.serving"]
PRELOADED += ["sparrow.apps.generate", "sparrow.analysis", "lightgbm"]
multiprocessing.set_forkserver_preload(PRELOADED)

# before anything imports Triton kernels: then its interpreter runs them on the CPU
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# torch asks the name server about every address that it connects to, and a lost answer costs five
# seconds unless told
os.environ.setdefault("RES_OPTIONS", "timeout:1")
# tests kill processes, not the machine: what was written is read back, whether or not the disk has
# it yet
FSYNC, os.fsync = os.fsync, os.fstat
# A busy machine is slow, and no test is about time. None is about luck either: examples are drawn
# from the test's name, unless `--hypothesis-profile fuzz` asks for others.
settings.register_profile("sparrow", deadline=None, derandomize=True)
settings.register_profile("fuzz", deadline=None)
settings.load_profile("sparrow")
# torch would keep each seed for a device that never comes, with a trace of the stack
if not torch.cuda.is_available():
    torch.cuda.manual_seed_all = torch.xpu.manual_seed_all = torch.mtia.manual_seed_all = (
        lambda seed: None
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """What a test draws does not hang on those before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def pytest_collection_finish() -> None:
    """What was imported stays: the collector need not look at it again."""
    gc.freeze()


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of real sets, which users' machines do not have."""
    path = Path(os.environ.get("SPARROW_DATA", Path(__file__).parents[2] / "shared" / "data"))
    if not path.is_dir():
        pytest.skip("no real data here: set SPARROW_DATA to the folder")
    return path


@pytest.fixture
def threads():
    """Set the number of threads in a test; put back afterwards."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures of pages are painted, but not written as SVG: most of a page's time goes there."""
    figure = pytest.importorskip("matplotlib.figure").Figure
    save = figure.savefig

    def save_others(self: Any, out: Any, *, format: str, **how: Any) -> None:
        if format == "svg":
            out.write(b"<svg/>")
        else:
            save(self, out, format=format, **how)

    monkeypatch.setattr(figure, "savefig", save_others)


@pytest.fixture
def fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's own, which tests of its errors need."""
    monkeypatch.setattr(os, "fsync", FSYNC)


@pytest.fixture(scope="session")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small raw log with every kind of column."""
    path = tmp_path_factory.mktemp("log") / "log.parquet"
    generate(path, rows=6000, users=60, items=40, categorical=3, numeric=3, seed=5)
    return path


@pytest.fixture(scope="session")
def prepared(log: Path) -> Path:
    """The small log, prepared."""
    data.prepare([log], log.parent / "prepared")
    return log.parent / "prepared"
