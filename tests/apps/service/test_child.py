"""Processes that hang, work for long, or are stopped together with who waits for them."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from sparrow.apps.service import child as children
from sparrow.apps.service import worker
from sparrow.apps.service.child import Child

pytestmark = [
    pytest.mark.multi,
    pytest.mark.skipif(sys.platform != "linux", reason="forks this process"),
]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes are forks, which import nothing, and ticks are short."""
    monkeypatch.setattr(children, "_processes", multiprocessing.get_context("fork"))
    monkeypatch.setattr(children, "TICK_S", 0.1)
    for name in ("LOADING", "SILENT", "ENDING"):
        monkeypatch.setattr(children, name, 10)


def waits(channel: socket.socket) -> None:
    """Say nothing until something comes, and then one line; go on until the line ends."""
    if channel.recv(1):
        channel.sendall(worker.line({"told": True}))
        while channel.recv(1 << 16):
            pass


def obeys_never(channel: socket.socket) -> None:
    """Load at once, and say forever that it goes on."""
    channel.sendall(worker.line({}))
    while True:
        time.sleep(0.02)
        channel.sendall(worker.BEAT)


def steps(target: Callable[..., None], do: Callable[[Child], Awaitable[Any]]) -> Child:
    child = Child(target)

    async def all_of_it() -> None:
        try:
            await asyncio.wait_for(do(child), 60)
        finally:
            child.close()
            await asyncio.sleep(0.01)  # in which the line is closed

    try:
        asyncio.run(all_of_it())
    finally:
        child.process.kill()
        child.process.join()
    return child


def test_a_process_that_says_nothing_is_killed(caplog: pytest.LogCaptureFixture) -> None:
    """Also one that is stopped, or does so at the end."""

    async def never(child: Child) -> None:
        with pytest.raises(EOFError):
            await child.open()
        await child.gone()

    assert steps(waits, never).is_hung
    assert "says nothing for 10 s; it is killed" in caplog.text

    async def stopped(child: Child) -> None:
        child._near_end.sendall(b"x")
        await child.open()
        os.kill(child.process.pid, signal.SIGSTOP)
        child.end()
        await child.gone()

    child = steps(waits, stopped)
    assert child.is_hung and child.process.exitcode == -signal.SIGKILL


def test_what_stops_together_is_not_silent() -> None:
    """A laptop that is shut: when it is opened, nothing has come in, and nobody could have said
    anything.
    """

    async def asleep(child: Child) -> None:
        opening = asyncio.ensure_future(child.open())
        await asyncio.sleep(0.1)
        time.sleep(2 * 10 * children.TICK_S)  # all of this process
        await asyncio.sleep(2 * children.TICK_S)
        child._near_end.send(b"x")
        assert await opening == {"told": True}

    assert not steps(waits, asleep).is_hung


def test_who_goes_on_and_does_not_obey_is_killed_where_that_is_bounded(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def asked(child: Child) -> None:
        assert await child.open() == {}
        waiting = asyncio.ensure_future(child.ask({}))
        await asyncio.sleep(20 * children.TICK_S)
        assert not waiting.done() and not child.is_hung
        waiting.cancel()
        with pytest.raises(EOFError):
            await child.ask({}, ticks=5)

    assert steps(obeys_never, asked).is_hung and "does not obey; it is killed" in caplog.text
