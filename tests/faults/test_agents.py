"""Two agents of torchrun, as on two hosts: each counts restarts for itself, and one may go and come back."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

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
            "--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=two",
            "--local-addr=127.0.0.1", f"--rdzv-conf=is_host={number == 0}", "--monitor-interval=0.1",
        ]  # fmt: skip
        jobs.append(Job(1, training.command(*arguments), training.said, 3, launch, **environment))
        return jobs[-1]

    try:
        yield start
    finally:
        for job in jobs:
            job.close()


def kill_worker(job: Job) -> None:
    """The one process that this agent has started."""
    (pid,) = (pid for pid in children(job.process.pid) if any(text.startswith("RANK=") for text in environ(pid)))
    os.kill(pid, signal.SIGKILL)


def assert_recovered(one: Job, other: Job, training: Training, whole: Training) -> None:
    for job in (one, other):
        assert job.end() == 0, job.output
    assert "continuing from step" in one.output + other.output
    training.assert_same(whole)


@pytest.mark.parametrize("number", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_killed_rank(whole: Callable[[int], Training], training: Training, number: int) -> None:
    """One agent counts a restart, and the other may not."""
    with agents(training) as start:
        both = start(0), start(1)
        both[0].until(lambda: training.step >= EVERY)
        kill_worker(both[number])
        assert_recovered(*both, training, whole(2))


@pytest.mark.slow
def test_killed_ranks_of_both_agents(whole: Callable[[int], Training], training: Training) -> None:
    """One after the other, the second while the first attempt to recover begins: counts lie apart."""
    with agents(training) as start:
        both = start(0), start(1)
        both[0].until(lambda: training.step >= EVERY)
        kill_worker(both[1])
        both[0].until(lambda: "continuing from step" in both[0].output + both[1].output)
        kill_worker(both[0])
        assert_recovered(*both, training, whole(2))


@pytest.mark.slow
def test_killed_agent_comes_back(whole: Callable[[int], Training], training: Training) -> None:
    """With a count of 0, among others that have counted. The store goes with rank 0's process here."""
    # else torch 2.13's agents wait for an address that the first one tells in the first round only
    with agents(training, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1") as start:
        stays, goes = start(0), start(1)
        stays.until(lambda: training.step >= EVERY)
        goes.close()
        assert_recovered(stays, start(1), training, whole(2))
