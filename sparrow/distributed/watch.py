"""Finds out who is missing when a rank waits in vain. Every rank says several times a second what it is doing."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from sparrow.core.errors import listed

T = TypeVar("T")
EVERY_S = 0.5
STORE = timedelta(seconds=5)  # the store of a small job answers within this time
EACH = timedelta(seconds=0.05)  # for every rank in addition: the store answers one at a time
PATIENCE_S = 6 * EVERY_S  # a rank that says nothing for so long is gone, or stopped
ENOUGH = 3  # words of each rank that speaks, see `_find`


class Watch:
    """Tells the job's store what this rank is doing, from its own thread. After a failure it asks about the others.

    job: a name that no other job had. where: returns what this rank is doing now. timeout: within it, it is connected.
    """

    def __init__(self, job: str, rank: int, size: int, where: Callable[[], str], timeout: timedelta = STORE) -> None:
        self.rank = rank
        self.size = size
        self._where = where
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        # its own client, because the other may be waiting; connecting may take long: torch asks for the host's name
        client = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
        self._limit = STORE + size * EACH
        client.set_timeout(self._limit)
        self._store = dist.PrefixStore(f"sparrow/watch/{job}", client)
        self._beats = 0
        self._done = threading.Event()
        self._tell()
        self._thread = threading.Thread(target=self._run, daemon=True, name="watch")
        self._thread.start()

    def _run(self) -> None:
        with suppress(Exception):  # the store ends with the job
            while not self._done.wait(EVERY_S):
                self._tell()

    def _tell(self, **more: Any) -> None:
        self._beats += 1
        self._store.set(str(self.rank), json.dumps({"beat": self._beats, "at": self._where(), **more}))

    def end(self, why: str, waited: bool = False) -> None:
        """Tell the others that this rank ends, and why. waited: whether it ends because of another rank."""
        self.stop()
        if not self._thread.is_alive():  # a living thread would hold the connection
            with suppress(Exception):
                self._in_time(lambda: self._tell(why=why, waited=waited))

    def stop(self) -> None:
        """Stop telling the store. A thread that still does would abort the process when the process ends."""
        self._done.set()
        self._thread.join(self._limit.total_seconds())

    def explain(self, why: str) -> str:
        """Returns one line about a failed collective: which rank failed first, which are gone, or which are elsewhere.

        The rank that asks first finds out and tells the others. Together they would ask more than a store can answer.
        """
        mine = self._where()
        try:
            if self._in_time(lambda: self._store.add("asked", 1)) > 1 and (told := self._told()):
                found = told
            else:
                found = self._find()
                self._in_time(lambda: self._store.set("found", found))
        except TimeoutError:
            return f"rank {self.rank} at {mine}: the job's store is gone, with the host that had it ({why})"
        return f"{found}; rank {self.rank} was at {mine} ({why})"

    def _told(self) -> str:
        """Returns what another rank found out, or "" if it ended before."""
        wait_s = 4 * PATIENCE_S + self._limit.total_seconds()  # more than that rank needs
        end = time.monotonic() + wait_s

        def look() -> str:
            while time.monotonic() < end:
                time.sleep(EVERY_S / 2)
                if self._store.check(["found"]):
                    return self._store.get("found").decode()
            return ""

        return self._in_time(look, wait_s)

    def _find(self) -> str:
        """Returns one line: the rank that failed first, else those silent for PATIENCE_S, else those elsewhere.

        A rank counts as silent only when all that speak have spoken ENOUGH times: on a busy machine all are late.
        """
        before, end = self._in_time(self._all), time.monotonic() + 3 * PATIENCE_S
        wait = 0 if any(_failed(told) for told in before) else PATIENCE_S
        while True:
            time.sleep(wait)
            now = self._in_time(self._all)
            for r, told in enumerate(now):
                if _failed(told):
                    return f"rank {r} ended at {told['at']}: {told['why']}"
            words = {
                r: now[r].get("beat", 0) - before[r].get("beat", 0) for r in range(self.size) if "why" not in now[r]
            }
            gone = [r for r in words if not words[r]]
            if not gone or min((n for n in words.values() if n), default=ENOUGH) >= ENOUGH or time.monotonic() > end:
                break
            wait = EVERY_S
        if gone:
            last = listed([f"rank {r} (last at {now[r].get('at', 'its start')})" for r in gone])
            return f"{last} {'is' if len(gone) == 1 else 'are'} gone or stopped"
        for r, told in enumerate(now):
            if "why" in told:
                return f"rank {r} gave up: {told['why']}"
        mine = self._where()
        late = listed([f"rank {r} is at {told['at']}" for r, told in enumerate(now) if told["at"] != mine])
        return f"rank {self.rank} waited in vain: {late or 'all ranks are there'}"

    def _all(self) -> list[dict[str, Any]]:
        """Returns what every rank said last; {} for ranks that never said anything."""
        ranks = [str(rank) for rank in range(self.size)]
        if not self._store.check(ranks):  # the store would make us wait for a key that is not there
            ranks = [rank for rank in ranks if self._store.check([rank])]
        told = dict(zip(ranks, self._store.multi_get(ranks), strict=True))
        return [json.loads(told.get(str(rank), b"{}")) for rank in range(self.size)]

    def _in_time(self, call: Callable[[], T], more_s: float = 0.0) -> T:
        """Returns what a call to the store returns. Over a cut link it would wait for ever, in spite of the timeout."""
        found: list[T] = []

        def run() -> None:
            with suppress(Exception):
                found.append(call())

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(self._limit.total_seconds() + more_s)
        if not found:
            raise TimeoutError
        return found[0]


def _failed(told: dict[str, Any]) -> bool:
    return "why" in told and not told["waited"]
