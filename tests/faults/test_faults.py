"""What befalls a job of many ranks, started as users start it: by torchrun, on a small log."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest

from sparrow.distributed.watch import SILENT_S
from tests.faults.job import Job, children
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
        assert re.match(
            rf"rank {rank} \(last at step \d+, .+\) is gone; rank \d was at step \d+, ", line
        ), line
    assert job.output.count("Traceback") == 1  # torchrun's


@pytest.mark.slow
def test_killed_stopped_and_restarted_is_uninterrupted(
    whole: Callable[[int], Training], training: Training
) -> None:
    """One run, three jobs: a rank is killed, a rank is told to stop, a rank is killed in a
    checkpoint.
    """
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


def in_a_collective(training: Training, job: Job, rank: int, share: float) -> None:
    """While it waits for another, which is stopped for so long."""
    other = job.pid((rank + 1) % job.ranks)
    os.kill(other, signal.SIGSTOP)
    time.sleep(0.2)
    job.send(signal.SIGKILL, rank)
    os.kill(other, signal.SIGCONT)


def in_a_checkpoint(training: Training, job: Job, rank: int, share: float) -> None:
    """While a checkpoint is being written."""
    pid = job.pid(rank)
    job.until(training.writing)
    time.sleep(share * 0.01)
    os.kill(pid, signal.SIGKILL)


def anywhere(training: Training, job: Job, rank: int, share: float) -> None:
    """At any time."""
    pid = job.pid(rank)
    time.sleep(share * 0.1)
    os.kill(pid, signal.SIGKILL)


QUICK = (2, in_a_checkpoint, True)


@pytest.mark.parametrize(
    ("ranks", "kill", "background"),
    [
        QUICK,
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in product((2, 4), (in_a_collective, in_a_checkpoint, anywhere), (False, True))
            if case != QUICK
        ),
    ],
)
def test_restarts_end_with_the_same_bits(
    whole: Callable[[int], Training],
    training: Training,
    ranks: int,
    kill: Callable[[Training, Job, int, float], None],
    background: bool,
) -> None:
    """A kill of any rank at any step; torchrun starts all of them again. The point is printed when
    it fails; the quick case has always the same, and takes 20 s: four times a process of Python.
    """
    drawn = Random(0 if (ranks, kill, background) == QUICK else None)
    last, rank, share = whole(ranks).step, drawn.randrange(ranks), drawn.random()
    at = drawn.randrange(0 if kill is anywhere else EVERY, last - 4 * EVERY)
    print(f"rank {rank} after step {at}, {kill.__name__}, {share} of its time")
    with training.job(ranks, restarts=1, checkpoint__background=background) as job:
        job.until(lambda: training.step >= at // EVERY * EVERY)
        kill(training, job, rank, share)
        assert job.end() == 0, job.output
        assert "exitcode: -9" in job.output  # it came in time
    training.assert_same(whole(ranks))


@pytest.mark.slow
def test_a_restart_does_not_go_on_with_an_older_run(training: Training) -> None:
    """Torchrun starts a refused job again; that must not make a --resume of it, nor forget an
    --overwrite.
    """
    with training.job(2, loop__max_steps=10) as job:
        assert job.end() == 0, job.output
    with training.job(2, restarts=1, loop__max_steps=10) as job:
        assert job.end() == 1
        assert len(job.errors) >= 2 and all(
            "holds a run up to step 10" in line for line in job.errors
        ), job.output
    with training.job(2, "--overwrite", restarts=1, loop__max_steps=15) as job:
        job.send(signal.SIGKILL, 1)  # it has read nothing yet
        assert job.end() == 0, job.output
        assert training.results["step"] == 15 and "resumed with" not in job.output


STOPPED = [
    (3, 1, "row_wise", ""),
    (2, 0, "data_parallel", ""),
    (3, 0, "row_wise", "1"),
    (2, 1, "table_wise", "1"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "rank", "plan", "own_store"), STOPPED)
def test_a_stopped_rank_is_named_long_before_the_timeout(
    training: Training,
    monkeypatch: pytest.MonkeyPatch,
    ranks: int,
    rank: int,
    plan: str,
    own_store: str,
) -> None:
    """By whatever the others wait: tables, or DDP alone; and where rank 0, which is stopped, holds
    the job's store.
    """
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", own_store or "0")
    with training.job(ranks, sharding__plan=plan) as job:
        job.until(lambda: training.step >= 2 * EVERY)
        stopped = job.pid(rank)
        job.send(signal.SIGSTOP, rank)
        limit = Deadline(NAMED, SILENT_S)
        job.until(lambda: bool(job.errors), 120)
        assert not limit.over
        job.until(
            lambda: all(pid == stopped or is_over(pid) for pid in children(job.process.pid)), 120
        )
        os.kill(stopped, signal.SIGCONT)  # it hears that the others are gone
        assert job.end() == 1
    silent = rf"rank {rank} \(last at step \d+, .+\)"
    silent = "rank 0, which holds the job's store," if own_store and not rank else silent
    assert re.match(
        rf"{silent} is stopped \(no word for 10 s\); rank \d was at step \d+, ", job.errors[0]
    ), job.errors
    assert "is stopped (no word for 10 s)" in job.output.rpartition("Root Cause")[2]


def is_over(pid: int) -> bool:
    """Whether a process has ended, though its parent may not have looked."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


HOLDER = """
import ctypes, time
from sparrow.distributed import begin_world, run_on_rank0

world = begin_world(timeout_s=120)
with world.watched():
    world.barrier("beginning")
    if world.rank == 1:
        time.sleep(13)
    world.barrier("one that sleeps")
    if world.rank == 2:
        ctypes.PyDLL(None).usleep(13_000_000)  # no other thread of Python runs
    world.barrier("one that holds the interpreter")
    world.timeout = world.timeout / 20
    run_on_rank0(world, "rank 0's work", lambda: time.sleep(13))  # longer than others would wait for anything else
    world.barrier("end")
print(f"rank {world.rank} is through")
"""


@pytest.mark.slow
def test_ranks_that_work_long_are_not_called_stopped(tmp_path: Path) -> None:
    """Beside four busy processes."""
    (tmp_path / "holder.py").write_text(HOLDER)
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
    job = Job(3, [str(tmp_path / "holder.py")], tmp_path)
    try:
        assert job.end(180) == 0, job.output
    finally:
        job.close()
        for process in busy:
            process.kill()
            process.wait()
    assert job.output.count("is through") == 3


SLEEPER = """
import sys, time
from sparrow.core import UserError
from sparrow.distributed import begin_world

slowness = float(sys.argv[1])
world = begin_world(timeout_s=4 * slowness)  # less, and a late start would be told in the place of the sleep
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


@pytest.mark.slow
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


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        # before ranks meet
        pytest.param({"model__dmi": 4}, "model.dmi", marks=pytest.mark.slow),
        ({"tables__tier__name": "ssd"}, "tables.tier: is ssd for "),  # when they have met
    ],
)
def test_a_mistake_of_all_ranks_is_told_once_and_last(
    training: Training, settings: dict[str, Any], told: str
) -> None:
    with training.job(2, **settings) as job:
        assert job.end() == 1
    (line,) = job.errors
    assert line.startswith(told) or told in line
    root = job.output.rpartition("Root Cause")[2]
    assert f"traceback : {line}" in root and "error_file: <N/A>" not in root
    assert job.output.count("Traceback") == 1  # torchrun's


PROGRAM = """
import sys
from sparrow.trained.run import Run
from sparrow.training import train
settings = {"run_dir": sys.argv[2], "model.name": "dcnv2", "tables.tier.name": "ssd", "log.tensorboard": False}
train(Run.of(sys.argv[1], settings))
"""


@pytest.mark.slow
def test_the_mistake_of_a_program_is_told_last(training: Training, tmp_path: Path) -> None:
    """One that calls the library itself, and catches nothing."""
    (tmp_path / "program.py").write_text(PROGRAM)
    job = Job(
        2,
        [str(tmp_path / "program.py"), str(training.prepared), str(training.dir)],
        tmp_path / "rank0",
    )
    try:
        assert job.end() == 1
    finally:
        job.close()
    root = job.output.rpartition("Root Cause")[2]
    assert "traceback : tables.tier: is ssd for " in root
    assert job.output.count("Traceback") == 2  # torchrun's, and one of the program


FAILING = """
import sys
from sparrow.cli import main
from sparrow.embeddings import EmbeddingTables
from sparrow.core import UserError
from sparrow.distributed import begin_world
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
    command = [
        str(tmp_path / "failing.py"),
        "train",
        str(training.prepared),
        "--run_dir",
        str(training.dir),
    ]
    job = Job(
        4,
        [*command, "--log.tensorboard", "false", "--sharding.plan", "row_wise"],
        tmp_path / "rank0",
    )
    try:
        assert job.end(60) == 1
    finally:
        job.close()
    said = "feature 'user': id 99 in a table of 60 rows; prepare the log again"
    assert said in job.errors
    assert len(job.errors) <= 2  # what all others say is said once
    for line in job.errors:
        assert line == said or line.startswith(
            f"rank 1 ended at step 8, computing: {said}; rank "
        ), line
    assert said in job.output.rpartition("Root Cause")[2]
    assert job.output.count("Traceback") == 1, job.output  # torchrun's


@pytest.mark.slow
@pytest.mark.parametrize(("first", "then"), [(2, 1), (1, 2), (4, 2), (2, 4)])
def test_goes_on_with_another_number_of_ranks(
    training: Training, alone: Training, first: int, then: int
) -> None:
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
