"""What befalls a job of many ranks, started as users start it: by torchrun, on a small log."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.job import Job
from tests.faults.training import EVERY, Training
from tests.pace import Deadline, slowness

pytestmark = pytest.mark.multi
NAMED = 10.0  # seconds of a quiet machine after a kill in which the job is to end


def assert_named(job: Job, rank: int, limit: Deadline) -> None:
    """It ended soon enough; torchrun and the ranks that were left say who was the first."""
    assert job.end() == 1
    assert not limit.over
    cause = job.output.split("Root Cause")[-1]
    assert re.search(rf"rank +: {rank} ", cause) and "Signal 9 (SIGKILL)" in cause
    assert job.errors, job.output
    for line in job.errors:
        assert re.match(rf"rank {rank} \(last at step \d+, .+\) is gone or stopped; rank \d was at step \d+, ", line), (
            line
        )
    assert job.output.count("Traceback") == 1  # torchrun's


@pytest.mark.slow
def test_killed_stopped_and_restarted_is_uninterrupted(whole: Callable[[int], Training], training: Training) -> None:
    """One run, three jobs: a rank is killed, a rank is told to stop, a rank is killed in a checkpoint."""
    with training.job(2) as job:
        job.until(lambda: training.step >= 2 * EVERY)
        job.send(signal.SIGKILL, 1)
        assert_named(job, 1, Deadline(NAMED))
    with training.job(2, "--resume") as job:
        before = training.step
        job.until(lambda: training.step > before)
        job.send(signal.SIGTERM, 1)
        assert job.end() == 0, job.output
        assert training.results["stopped_by"] == "a signal to another rank"
        assert before < training.results["step"] == training.step < whole(2).step
    with training.job(2, "--resume", restarts=1) as job:
        before = training.step
        job.until(lambda: training.step > before)
        job.until(training.writing)
        job.send(signal.SIGKILL, 0)
        assert job.end() == 0, job.output
        assert len(job.errors) == 1 and job.errors[0].startswith("rank 0 (last at "), job.output
    training.assert_same(whole(2))


def in_a_collective(training: Training, job: Job, rank: int) -> None:
    """While it waits for another, which is stopped for so long."""
    other = job.pid((rank + 1) % job.ranks)
    os.kill(other, signal.SIGSTOP)
    time.sleep(0.2)
    job.send(signal.SIGKILL, rank)
    os.kill(other, signal.SIGCONT)


def in_a_checkpoint(training: Training, job: Job, rank: int) -> None:
    """While a checkpoint is being written."""
    pid = job.pid(rank)
    job.until(training.writing)
    time.sleep(random.random() * 0.01)
    os.kill(pid, signal.SIGKILL)


def anywhere(training: Training, job: Job, rank: int) -> None:
    """At any time."""
    pid = job.pid(rank)
    time.sleep(random.random() * 0.1)
    os.kill(pid, signal.SIGKILL)


@pytest.mark.slow  # test_agents.py has a quick one
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kill", [in_a_collective, in_a_checkpoint, anywhere])
@pytest.mark.parametrize("background", [False, True])
def test_restarts_end_with_the_same_bits(
    whole: Callable[[int], Training], training: Training, ranks: int, kill: Callable[[Training, Job, int], None],
    background: bool,
) -> None:  # fmt: skip
    """A kill of any rank at any step; torchrun starts all of them again. The point is printed when it fails."""
    last, rank = whole(ranks).step, random.randrange(ranks)
    at = random.randrange(0, last - 4 * EVERY) if kill is anywhere else random.randrange(EVERY, last - 4 * EVERY)
    print(f"rank {rank} after step {at}, {kill.__name__}")
    with training.job(ranks, restarts=1, checkpoint__background=background) as job:
        job.until(lambda: training.step >= at // EVERY * EVERY)
        kill(training, job, rank)
        assert job.end() == 0, job.output
        assert "exitcode: -9" in job.output  # it came in time
    training.assert_same(whole(ranks))


@pytest.mark.slow
def test_a_restart_does_not_go_on_with_an_older_run(training: Training) -> None:
    """Torchrun starts a refused job again; that must not make a --resume of it, nor forget an --overwrite."""
    with training.job(2, loop__max_steps=10) as job:
        assert job.end() == 0, job.output
    with training.job(2, restarts=1, loop__max_steps=10) as job:
        assert job.end() == 1
        assert len(job.errors) >= 2 and all("holds a run up to step 10" in line for line in job.errors), job.output
    with training.job(2, "--overwrite", restarts=1, loop__max_steps=15) as job:
        job.send(signal.SIGKILL, 1)  # it has read nothing yet
        assert job.end() == 0, job.output
        assert training.results["step"] == 15 and "resumed with" not in job.output


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_stopped_rank_is_named(training: Training, rank: int) -> None:
    timeout = round(5 * slowness())
    with training.job(2, sharding__timeout_s=timeout) as job:
        job.until(lambda: training.step >= 2 * EVERY)
        job.send(signal.SIGSTOP, rank)
        told, ended = Deadline(NAMED, timeout), Deadline(2 * NAMED, timeout)
        job.until(lambda: bool(job.errors))
        assert not told.over
        job.send(signal.SIGCONT, rank)
        assert job.end() == 1
        gone = rf"rank {rank} \(last at step \d+, .+\) is gone or stopped; rank {1 - rank} was at step \d+, "
        assert re.match(rf"{gone}.* \((Timed out|Application timeout)", job.errors[0]), job.errors  # Gloo's two ways
        assert not ended.over


SLEEPER = """
import sys, time
from sparrow.core import UserError
from sparrow.distributed import World

slowness = float(sys.argv[1])
world = World.begin(timeout_s=4 * slowness)  # less, and a late start would be told in the place of the sleep
try:
    with world.watched():
        world.barrier("beginning")
        world.step = 7
        if world.rank == 1:
            with world.at("reading a slow disk"):
                time.sleep(12 * slowness)
        world.barrier("checkpoint")
except UserError as error:
    sys.exit(f"sparrow: error: {error}")
"""


def test_late_rank_is_named(tmp_path: Path) -> None:
    """It lives, but is not where the other waits for it."""
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    job = Job(2, [str(tmp_path / "sleeper.py"), str(slowness())], tmp_path)
    try:
        assert job.end() == 1
        slow = "rank 1 is at step 7, reading a slow disk"
        pattern = rf"rank 0 waited in vain: {slow}; rank 0 was at step 7, checkpoint \(Timed out"
        assert job.errors, job.output
        assert re.match(pattern, job.errors[0]), job.output
    finally:
        job.close()


FAILING = """
import sys
from sparrow.cli import main
from sparrow.embeddings import EmbeddingTables
from sparrow.core import UserError
from sparrow.distributed import World
from sparrow.training.ranks import Ranks

sums = Ranks.sums
def fail(self, *arguments):
    if self.world.rank == 1 and self.world.step == 8:
        raise UserError("feature 'user': id 99 in a table of 60 rows; prepare the log again")
    return sums(self, *arguments)
Ranks.sums = fail
sys.exit(main())
"""


@pytest.mark.slow
def test_mistake_on_one_rank_is_told_by_all(training: Training, tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text(FAILING)
    command = [str(tmp_path / "failing.py"), "train", str(training.prepared), "--run_dir", str(training.dir)]
    job = Job(4, [*command, "--log.tensorboard", "false", "--sharding.plan", "row_wise"], tmp_path / "said")
    try:
        assert job.end(60) == 1
    finally:
        job.close()
    said = "feature 'user': id 99 in a table of 60 rows; prepare the log again"
    assert said in job.errors
    for line in job.errors:
        assert line == said or line.startswith(f"rank 1 ended at step 8, computing: {said}; rank "), line
    assert job.output.count("Traceback") == 1, job.output  # torchrun's


@pytest.mark.slow
@pytest.mark.parametrize(("first", "then"), [(2, 1), (1, 2), (4, 2), (2, 4)])
def test_goes_on_with_another_number_of_ranks(training: Training, alone: Training, first: int, then: int) -> None:
    with training.job(first) as job:
        job.until(lambda: training.step >= 6 * EVERY)
        job.send(signal.SIGTERM, first - 1)
        assert job.end() == 0, job.output
    assert training.step < alone.step
    with training.job(then, "--resume") as job:
        assert job.end() == 0, job.output
    training.assert_near(alone)


@pytest.mark.slow
def test_a_restart_goes_on_in_the_precision_that_was_chosen(training: Training) -> None:
    """Torchrun starts the same command again, without --resume."""
    with training.job(2, "--precision", "auto", restarts=1) as job:
        job.until(lambda: training.step >= EVERY, 120)
        chosen = (training.dir / "auto.toml").stat().st_mtime_ns
        job.send(signal.SIGKILL, 1)
        assert job.end(120) == 0, job.output
    assert job.output.count("auto trains at most") == 1, job.output
    assert "continuing from step" in job.output
    assert (training.dir / "auto.toml").stat().st_mtime_ns == chosen
    assert [path.name for path in training.dir.parent.iterdir() if path.name.startswith(".")] == []
