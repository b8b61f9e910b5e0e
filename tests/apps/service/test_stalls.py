from __future__ import annotations

import asyncio
import multiprocessing
import sys
import threading
import time
from multiprocessing.connection import Connection

import pytest

from sparrow.apps.service import stalls
from sparrow.apps.service.stalls import in_thread, working
from sparrow.core.errors import UserError

WAITS = 5


def load(line: Connection) -> None:
    """Wait some times, then compute until that was said."""
    said: list[int] = []
    waiting = []
    with working(lambda: said.append(1)):
        for _ in range(WAITS):
            before = len(said)
            line.recv()
            waiting.append(len(said) - before)
        before, end = len(said), time.monotonic() + 60
        while len(said) < before + 3 and time.monotonic() < end:
            sum(range(1000))
    line.send((waiting, len(said) - before))


@pytest.mark.skipif(sys.platform != "linux", reason="forks this process")
def test_who_works_says_so_and_who_waits_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stalls, "BEAT_S", 0.02)
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    process = fork.Process(target=load, args=(theirs,), daemon=True)
    process.start()
    for _ in range(WAITS):
        time.sleep(0.1)  # some five beats
        ours.send(None)
    waiting, computing = ours.recv()
    process.join()
    # A process that has just begun still works, and so may one that is woken. Not in each wait.
    assert min(waiting) == 0 and computing == 3, waiting


def test_what_does_not_answer_is_not_waited_for(capfd: pytest.CaptureFixture[str]) -> None:
    """Neither by who asks nor at the end of the process, and its late answer disturbs nobody."""
    late = threading.Event()

    def fails() -> None:
        raise UserError("no")

    async def steps() -> None:
        assert await in_thread("place", 60, lambda a, b: a + b, 1, 2) == 3
        with pytest.raises(UserError, match="no"):
            await in_thread("place", 60, fails)
        with pytest.raises(UserError, match=r"place: does not answer for 0.05 s; see to its disk"):
            await in_thread("place", 0.05, late.wait, 60)

    asyncio.run(steps())
    assert not late.is_set()
    late.set()
    for thread in threading.enumerate():
        if thread.name.endswith("(run)"):
            thread.join()
    assert capfd.readouterr().err == ""


def test_a_cancellation_is_heard_though_the_thread_is_done() -> None:
    """At the same moment. Python 3.11's wait_for gave the result, and a watching service went on."""

    async def steps() -> None:
        loop = asyncio.get_running_loop()
        task = asyncio.create_task(in_thread("place", 60, int))
        call = loop.call_soon_threadsafe
        loop.call_soon_threadsafe = lambda settle, *of: call(  # type: ignore[method-assign]
            lambda: (settle(*of), task.cancel())
        )
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(steps())
