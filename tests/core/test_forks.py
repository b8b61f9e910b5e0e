"""What a process made before a fork works after it, in the parent and in the child."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sparrow.kernels import missing
from sparrow.serving.export import export
from sparrow.trained.run import Loop
from sparrow.training import train
from tests.runs import small_run

linux = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="forks of other systems lose more than threads"
)
WORK = """
import os, signal, sys, torch
from pathlib import Path
import numpy as np, pyarrow.parquet as pq
import sparrow

def products():
    a = torch.arange(600.0 * 600).view(600, 600) / 3.6e5
    return (a @ a).sum(), a.expand(8, -1, -1).contiguous().exp().sum()

def fork(work):
    pid = os.fork()
    if pid == 0:
        signal.alarm(300)  # one that waits for threads it does not have waits for ever
        try:
            work()
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", flush=True)
            os._exit(1)
        sys.exit()  # as a worker of gunicorn ends: what is to happen at the end of a process happens
    assert os.waitpid(pid, 0)[1] == 0, "the child failed"
"""


def run(code: str, *arguments: Path) -> None:
    command = [sys.executable, "-c", WORK + code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def model(prepared: Path, log: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("forks")
    train(small_run(prepared, place / "run", loop=Loop(max_steps=3)))
    export(place / "run", place / "model", [log])
    return place / "model"


# of the program that scored: it opens tables on an SSD, whichever way they are read
ON_SSD = """
from sparrow.extensions.tiers.serving import Ssd

def on_ssd(way):
    return Ssd(folder=Path(sys.argv[3]), least_mb=0.0, cache_mb=0.0, way=way)

scorers = {way: load(sys.argv[1], ssd=on_ssd(way)) for way in ("io_uring", "threads")}
rows = rows[:100]
before = scorers["threads"].score(rows)
assert np.array_equal(scorers["io_uring"].score(rows), before)

def work_on_ssd():
    for way, scorer in scorers.items():
        try:
            scorer.score(rows)
        except ValueError as error:
            assert "opened before a fork; open the model" in str(error), error
        else:
            raise AssertionError("the parent's reader answered")
        assert np.array_equal(load(sys.argv[1], ssd=on_ssd(way)).score(rows), before)

fork(work_on_ssd)
assert all(np.array_equal(scorer.score(rows), before) for scorer in scorers.values())
"""


@linux
@pytest.mark.multi
def test_a_child_of_a_program_that_scored_scores_with_as_many_threads(
    model: Path, log: Path, tmp_path: Path
) -> None:
    """And opens tables on an SSD itself, where there are compiled kernels that read them."""
    code = """
from sparrow.serving import load
scorer = load(sys.argv[1], threads=2)
rows = pq.read_table(sys.argv[2]).select(list(scorer.encoder.sources)).to_pylist()
before = scorer.score(rows)
many = products()

def work():
    assert products() == many
    assert np.array_equal(scorer.score(rows), before)
    assert np.array_equal(load(sys.argv[1], threads=2).score(rows), before)
    assert torch.get_num_threads() == 2

fork(work)
assert np.array_equal(scorer.score(rows), before) and products() == many
"""
    run(code + ("" if missing() else ON_SSD), model, log, tmp_path / "ssd")


@linux
@pytest.mark.multi
def test_a_child_of_a_program_that_fitted_predicts_and_fits(log: Path) -> None:
    """And the model's files stay the parent's."""
    code = """
table = pq.read_table(sys.argv[1]).slice(0, 2000)
torch.set_num_threads(2)
settings = {"loop.max_steps": 3}
fitted = sparrow.fit(table, settings=settings)
before = fitted.predict(table)
many = products()

def work():
    assert products() == many
    assert np.array_equal(fitted.predict(table), before)
    assert np.array_equal(sparrow.fit(table, settings=settings).predict(table), before)

fork(work)
assert fitted.run_dir.is_dir() and np.array_equal(fitted.predict(table), before)
"""
    run(code, log)
