"""Ranks as processes that stay for many cases: starting one takes seconds, a case milliseconds."""

from __future__ import annotations

import gc
import multiprocessing as mp
import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from sparrow.distributed import World
from tests.pace import Deadline


class Pool:
    """`size` ranks on hosts of `local_size`, over Gloo on loopback."""

    def __init__(self, size: int, local_size: int) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        context = mp.get_context("forkserver")  # which imports torch once, not every rank for itself
        context.set_forkserver_preload(["tests.equivalence.cases"])
        self.size, self.pipes, self.processes, self.broken = size, [], [], ""
        for rank in range(size):
            ours, theirs = context.Pipe()
            environment = {
                "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(local_size),
                "LOCAL_RANK": str(rank % local_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            }  # fmt: skip
            process = context.Process(target=_serve, args=(theirs, environment), daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, case: Callable[..., Any], *arguments: Any) -> list[Any]:
        """`case(world, *arguments)` on every rank; what each gave. The first failure is raised here."""
        assert not self.broken, self.broken
        for pipe in self.pipes:
            pipe.send((case, arguments))
        found = []
        for rank, pipe in enumerate(self.pipes):
            deadline = Deadline(120)
            while not pipe.poll(1) and not self.broken:
                if deadline.over:
                    self.broken = f"rank {rank} said nothing for {deadline}"
            assert not self.broken, self.broken
            found.append(pipe.recv())
        for rank, (failed, value) in enumerate(found):
            assert not failed, f"rank {rank}:\n{value}"
        return [value for _, value in found]

    def close(self) -> None:
        """End the ranks."""
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()


def _serve(pipe: Connection, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    os.fsync = os.fstat  # see tests/conftest.py
    world = World.begin()
    gc.freeze()  # what is there now is never looked at again: to collect what a case leaves takes milliseconds
    while (work := pipe.recv()) is not None:
        case, arguments = work
        try:
            pipe.send((False, case(world, *arguments)))
        except Exception:
            pipe.send((True, traceback.format_exc()))
        gc.collect()  # a job's groups have threads, which wake a hundred times a second while anything holds it
    world.end()
    os._exit(0)  # taking the interpreter apart takes a second
