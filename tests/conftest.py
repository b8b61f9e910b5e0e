from __future__ import annotations

import gc
import os
from pathlib import Path

# before torch is imported: a thread that waits for others sleeps, and leaves its core to the test beside it
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
import torch
from hypothesis import settings

from sparrow import data

pytest.register_assert_rewrite("tests.kernels.embedding_bag.cases")  # before any test imports it

if not torch.cuda.is_available():  # before anything imports Triton kernels: then its interpreter runs them on the CPU
    os.environ.setdefault("TRITON_INTERPRET", "1")

# torch asks the name server about every address that it connects to, and a lost answer costs five seconds unless told
os.environ.setdefault("RES_OPTIONS", "timeout:1")
# tests kill processes, not the machine: what was written is read back, whether or not the disk has it yet
FSYNC, os.fsync = os.fsync, os.fstat
settings.register_profile("sparrow", deadline=None)  # a busy machine is slow, and no test is about time
settings.load_profile("sparrow")
if not torch.cuda.is_available():  # torch would keep each seed for a device that never comes, with a trace of the stack
    torch.cuda.manual_seed_all = torch.xpu.manual_seed_all = torch.mtia.manual_seed_all = lambda seed: None


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
def fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's own, which tests of its errors need."""
    monkeypatch.setattr(os, "fsync", FSYNC)


@pytest.fixture(scope="session")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small raw log with every kind of column."""
    path = tmp_path_factory.mktemp("log") / "log.parquet"
    data.generate(path, rows=6000, users=60, items=40, categorical=3, numeric=3, seed=5)
    return path


@pytest.fixture(scope="session")
def prepared(log: Path) -> Path:
    """The small log, prepared."""
    data.prepare([log], log.parent / "prepared")
    return log.parent / "prepared"
