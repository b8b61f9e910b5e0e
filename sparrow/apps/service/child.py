"""A process of the service, the line to it, and how long it may say nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import wait
from typing import Any

from sparrow.apps.service import worker
from sparrow.core.errors import UserError

_processes: Any = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
TICK_S = 1.0
# ticks in which a process may say nothing: while it answers, loads a model, ends
SILENT = 10
LOADING = 60
ENDING = 5
_DEATH_S = 10.0  # a process that is killed and stays so long waits for a disk
_log = logging.getLogger(__name__)


def ready_processes() -> None:
    """Have one process import all that workers need. They are forks of it: they start sooner, and
    share that memory.

    Signals are ignored from here on, as it takes over what is. It finds modules where this process
    does, and not first in the folder in which the service was started.
    """
    worker.hear_no_signals()
    os.environ |= {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    if sys.platform == "linux":  # elsewhere not all libraries survive a fork
        _processes.set_forkserver_preload([worker.__name__])
        forkserver.ensure_running()


class Child:
    """A process and the line to it. It is killed when it says nothing for too long.

    Time counts in ticks of this process. So where both are stopped, as on a laptop that is shut,
    and where both are slow, no time passes.

    Args:
        target: what it does. It is called with its end of the line and the arguments.
        arguments: what can be sent to a process.
    """

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        self._near_end, far_end = socket.socketpair()
        with far_end:
            self.process = _processes.Process(
                target=target, args=(far_end, *arguments), daemon=True
            )
            self.process.start()
        self._writer: asyncio.StreamWriter | None = None
        self._hearing: asyncio.Task[None] | None = None
        self._lines: asyncio.Queue[bytes] = asyncio.Queue()
        self._order_lock = asyncio.Lock()
        self._patience, self._left = LOADING, float("inf")  # ticks: to say anything, and to obey
        self.begun = time.monotonic()
        self.is_hung = False

    async def open(self) -> dict[str, Any]:
        """Returns its first line. To load a model may take long, but it says that it goes on.

        Raises:
            EOFError, UserError: see `ask`.
        """
        reader, self._writer = await asyncio.open_unix_connection(
            sock=self._near_end, limit=worker.LINE
        )
        self._hearing = asyncio.create_task(self._hear(reader))
        answer = await self._answer()
        self._patience = SILENT
        return answer

    async def ask(self, order: dict[str, Any], ticks: float = float("inf")) -> dict[str, Any]:
        """Give it an order. Returns its answer.

        Args:
            order: see `worker`.
            ticks: how many it may take to obey.

        Raises:
            EOFError: when it has died, or was killed because it hangs.
            UserError: when it refuses.
        """
        async with self._order_lock:
            assert self._writer is not None
            self._left = ticks
            with contextlib.suppress(OSError, RuntimeError):  # it has died
                self._writer.write(worker.line(order))
            try:
                return await self._answer()
            finally:
                self._left = float("inf")

    async def _answer(self) -> dict[str, Any]:
        line = await self._lines.get()
        if not line:
            self._lines.put_nowait(line)  # for who asks next
            await self.kill()
            raise EOFError
        reply: dict[str, Any] = json.loads(line)
        if "refused" in reply:
            raise UserError(reply["refused"])
        return reply

    async def _hear(self, reader: asyncio.StreamReader) -> None:
        """Take its lines until it ends, and kill it when they stay away."""
        silent = 0
        with contextlib.suppress(OSError, ValueError):
            while True:
                try:
                    async with asyncio.timeout(TICK_S):
                        line = await reader.readline()
                    if not line.endswith(b"\n"):
                        break
                    silent = 0
                except TimeoutError:
                    line = worker.BEAT
                    silent = silent + 1
                if line != worker.BEAT:
                    self._lines.put_nowait(line)
                    continue
                self._left -= 1
                if silent >= self._patience or self._left < 0:
                    self._kill_hung(
                        f"says nothing for {silent} s" if self._left >= 0 else "does not obey"
                    )
                    break
        self._lines.put_nowait(b"")

    def _kill_hung(self, why: str) -> None:
        self.is_hung = True
        _log.error("worker %s: %s; it is killed", self.process.pid, why)
        self.process.kill()

    async def gone(self) -> None:
        """Wait until it has died. One that was killed, and does not die as it waits for a disk,
        counts as dead.
        """
        assert self._hearing is not None
        await self._hearing
        await self.kill(after_s=_DEATH_S)
        self.process.join(0)

    async def kill(self, after_s: float = 0) -> None:
        """Kill it, unless it dies by itself before. Returns when it cannot answer any more."""
        if after_s:
            await asyncio.to_thread(wait, [self.process.sentinel], after_s)
        if self.process.is_alive():
            self.process.kill()
            await asyncio.to_thread(wait, [self.process.sentinel], _DEATH_S)

    def end(self) -> None:
        """Tell it to end. It goes on to say that it is there, or is killed soon."""
        self._patience = ENDING
        if self._writer is None:
            self._near_end.close()
        else:
            with contextlib.suppress(OSError, RuntimeError):
                self._writer.write_eof()

    def close(self) -> None:
        """Give up the line to it."""
        (self._writer or self._near_end).close()
