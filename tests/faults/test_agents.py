"""Two agents of torchrun, as on two hosts: each counts restarts for itself, and one may go and come
back.
"""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from sparrow import checkpoint
from sparrow.trained.build import load_weights
from tests.faults.job import Job, children, environ
from tests.faults.training import EVERY, Training

pytestmark = pytest.mark.multi
Start = Callable[[int], Job]


@contextmanager
def agents(training: Training, *arguments: str, **environment: str) -> Iterator[Start]:
    """Starts agents by number, of which the first holds the rendezvous."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    jobs: list[Job] = []

    def start(number: int) -> Job:
        launch = [
            "--nnodes=2",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint=127.0.0.1:{port}",
            "--rdzv-id=two",
            "--local-addr=127.0.0.1",
            f"--rdzv-conf=is_host={number == 0}",
            "--monitor-interval=0.1",
        ]
        jobs.append(Job(1, training.command(*arguments), training.said, 3, launch, **environment))
        return jobs[-1]

    try:
        yield start
    finally:
        for job in jobs:
            job.close()


def worker(job: Job) -> int:
    """The one process that this agent has started."""
    (pid,) = (
        pid
        for pid in children(job.process.pid)
        if any(text.startswith("RANK=") for text in environ(pid))
    )
    return pid


def assert_recovered(one: Job, other: Job, training: Training, whole: Training) -> None:
    for job in (one, other):
        assert job.end() == 0, job.output
    assert "continuing from step" in one.output + other.output
    training.assert_same(whole)


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_killed_rank(whole: Callable[[int], Training], training: Training, number: int) -> None:
    """While a checkpoint is being written. One agent counts a restart, and the other may not."""
    with agents(training) as start:
        both = start(0), start(1)
        both[0].until(lambda: training.step >= EVERY)
        pid = worker(both[number])
        both[0].until(training.writing)
        time.sleep(random.random() * 0.01)
        os.kill(pid, signal.SIGKILL)
        assert_recovered(*both, training, whole(2))
        for line in both[0].errors + both[1].errors:
            assert re.match(r"rank \d \(last at [^\n]+\) is gone; rank \d was at ", line), line


@pytest.mark.slow
def test_killed_ranks_of_both_agents(whole: Callable[[int], Training], training: Training) -> None:
    """One after the other, the second while the first attempt to recover begins: counts lie
    apart.
    """
    with agents(training) as start:
        both = start(0), start(1)
        both[0].until(lambda: training.step >= EVERY)
        os.kill(worker(both[1]), signal.SIGKILL)
        both[0].until(lambda: "continuing from step" in both[0].output + both[1].output)
        os.kill(worker(both[0]), signal.SIGKILL)
        assert_recovered(*both, training, whole(2))


@pytest.mark.slow
def test_killed_agent_comes_back(whole: Callable[[int], Training], training: Training) -> None:
    """With a count of 0, among others that have counted. The store goes with rank 0's process
    here.
    """
    # else torch 2.13's agents wait for an address that the first one tells in the first round only
    with agents(training, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1") as start:
        stays, goes = start(0), start(1)
        stays.until(lambda: training.step >= EVERY)
        goes.close()
        assert_recovered(stays, start(1), training, whole(2))


def test_one_process_reads_what_many_wrote(
    whole: Callable[[int], Training], alone: Training
) -> None:
    """Each table's bytes are those of the shards, side by side."""
    many, before = whole(2), torch.get_num_threads()
    saved = checkpoint.load(many.dir / "checkpoints")
    trainer = many.trainer(resume=True)
    load_weights(trainer.job.model, saved)
    torch.set_num_threads(before)
    rows = {r.name: r for tables in trainer.job.tables for r in tables.all_records()}
    seen = dict.fromkeys(rows, 0)
    for chunk in saved.chunks():
        for name, values in chunk.fields.items():
            assert torch.equal(values, rows[chunk.table].fields[name][slice(*chunk.rows)])
        seen[chunk.table] += chunk.rows[1] - chunk.rows[0]
    assert seen == {name: record.rows for name, record in rows.items()}
    many.assert_near(alone)
