"""Ranks as processes that stay for many cases: starting one takes seconds, a case milliseconds."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing as mp
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from functools import cache
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from sparrow.distributed import begin_world
from sparrow.training import many_ranks
from tests.pace import Deadline

PR_SET_PDEATHSIG = 1  # of linux/prctl.h


class Pool:
    """`size` ranks on hosts of `local_size`, over Gloo on loopback."""

    def __init__(self, size: int, local_size: int) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        context = mp.get_context("forkserver")  # see tests/conftest.py
        self.size, self.pipes, self.processes, self.broken = size, [], [], ""
        for rank in range(size):
            ours, theirs = context.Pipe()
            environment = {
                "RANK": str(rank),
                "WORLD_SIZE": str(size),
                "LOCAL_WORLD_SIZE": str(local_size),
                "LOCAL_RANK": str(rank % local_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            process = context.Process(target=_serve, args=(theirs, environment), daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, case: Callable[..., Any], *arguments: Any) -> list[Any]:
        """`case(world, *arguments)` on every rank; what each gave. Their failures are raised
        here.
        """
        assert not self.broken, self.broken
        self._signal(signal.SIGCONT)
        for pipe in self.pipes:
            pipe.send((os.environ.get("PYTEST_CURRENT_TEST", ""), case, arguments))
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = Deadline(120)
        while len(answers) < self.size and not self.broken:
            waiting = {pipe: rank for rank, pipe in enumerate(self.pipes) if rank not in answers}
            for pipe in wait(list(waiting), timeout=1):
                answers[waiting[pipe]] = pipe.recv()  # type: ignore[index, union-attr]
                deadline = Deadline(120)
            if deadline.over:
                self.broken = f"ranks {sorted(waiting.values())} said nothing for {deadline}"
                for process in self.processes:
                    process.kill()
        self._signal(signal.SIGSTOP)
        failures = [
            f"rank {rank}:\n{value}" for rank, (failed, value) in sorted(answers.items()) if failed
        ]
        assert not failures, "\n".join([*failures, self.broken])
        assert not self.broken, self.broken
        return [answers[rank][1] for rank in range(self.size)]

    def _signal(self, number: signal.Signals) -> None:
        """Let the ranks go on or sleep. Each of Gloo's threads wakes a hundred times a second, and
        ranks sleep most of the time.
        """
        for process in self.processes:
            assert process.pid is not None
            if not self.broken:
                os.kill(process.pid, number)

    def close(self) -> None:
        """End the ranks."""
        self._signal(signal.SIGCONT)
        if not self.broken:
            for pipe in self.pipes:
                pipe.send(None)
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()


def _serve(pipe: Connection, environment: dict[str, str]) -> None:
    if sys.platform == "linux":  # who is stopped does not see that nobody is left to go on for
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ.update(environment)
    torch.set_num_threads(1)
    many_ranks._sources = cache(many_ranks._sources)  # a fifth of what a small job takes
    world = begin_world()
    # what is there now is never looked at again: to collect what a case leaves takes milliseconds
    gc.freeze()
    while (work := pipe.recv()) is not None:
        test, case, arguments = work
        coverage = sys.modules.get("coverage")  # where lint/mutants.py measures
        if coverage and (measured := coverage.Coverage.current()):
            measured.switch_context(test)
        try:
            pipe.send((False, case(world, *arguments)))
        except Exception:
            pipe.send((True, traceback.format_exc()))
        # a job's groups have threads, which wake a hundred times a second while anything holds it
        gc.collect()
    world.end()
    os._exit(0)  # taking the interpreter apart takes a second
