"""Who is missing when a rank waits in vain: every rank says some times a second what it is at."""

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

T = TypeVar("T")
EVERY_S = 0.5
STORE = timedelta(seconds=5)
PATIENCE_S = 6 * EVERY_S  # without a word for so long a rank is gone, or stopped


def attempt() -> int:
    """How often torchrun has started this job again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def store(name: str) -> dist.Store:
    """A client of the job's store, of its own: others may be waiting. It outlives the ranks when torchrun holds it."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    client = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=STORE)
    return dist.PrefixStore(f"sparrow/{name}", client)


class Watch:
    """Tells the job's store what this rank is at, from a thread of its own; asks it about the others after a failure.

    where: what this rank is at now.
    """

    def __init__(self, rank: int, size: int, where: Callable[[], str]) -> None:
        self.rank, self.size, self._where = rank, size, where
        self._store = store(f"watch/{attempt()}")
        self._beats = 0
        self._done = threading.Event()
        self._tell()
        self._thread = threading.Thread(target=self._run, daemon=True, name="watch")
        self._thread.start()

    def _run(self) -> None:
        with suppress(Exception):  # the store goes with the job
            while not self._done.wait(EVERY_S):
                self._tell()

    def _tell(self, **more: Any) -> None:
        self._beats += 1
        self._store.set(str(self.rank), json.dumps({"beat": self._beats, "at": self._where(), **more}))

    def end(self, why: str, waited: bool = False) -> None:
        """Tell the others that this rank ends, and why. waited: because of another."""
        self._done.set()
        self._thread.join(STORE.total_seconds())
        if not self._thread.is_alive():  # it would hold the connection
            with suppress(Exception):
                _in_time(lambda: self._tell(why=why, waited=waited))

    def stop(self) -> None:
        """No more."""
        self._done.set()

    def explain(self, why: str) -> str:
        """One line on a failed collective: which rank failed first, which are gone, or else which are elsewhere."""
        mine = self._where()
        try:
            before = _in_time(self._all)
            if not any(_failed(told) for told in before):
                time.sleep(PATIENCE_S)
            now = _in_time(self._all)
        except Exception:
            return f"rank {self.rank} at {mine}: the job's store is gone, with the host that had it ({why})"
        others = [r for r in range(self.size) if r != self.rank]
        for r in others:
            if _failed(now[r]):
                return f"rank {r} ended at {now[r]['at']}: {now[r]['why']}; rank {self.rank} was at {mine}"
        gone = [r for r in others if "why" not in now[r] and now[r].get("beat") == before[r].get("beat")]
        if gone:
            told = ", ".join(f"rank {r} (last at {now[r].get('at', 'its start')})" for r in gone)
            return f"{told} {'is' if len(gone) == 1 else 'are'} gone or stopped; rank {self.rank} was at {mine} ({why})"
        for r in others:
            if "why" in now[r]:
                return f"rank {r} gave up: {now[r]['why']}; rank {self.rank} was at {mine}"
        late = [r for r in others if now[r].get("at") != mine]
        told = ", ".join(f"rank {r} is at {now[r].get('at')}" for r in late) or "all ranks are there"
        return f"rank {self.rank} waited in vain at {mine}: {told} ({why})"

    def _all(self) -> list[dict[str, Any]]:
        found = []
        for rank in range(self.size):
            known = self._store.check([str(rank)])
            found.append(json.loads(self._store.get(str(rank))) if known else {})
        return found


def _failed(told: dict[str, Any]) -> bool:
    return "why" in told and not told["waited"]


def _in_time(call: Callable[[], T]) -> T:
    """What a call to the store gives; over a cut link it would wait for ever, whatever the client's timeout."""
    found: list[T] = []

    def run() -> None:
        with suppress(Exception):
            found.append(call())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(STORE.total_seconds())
    if not found:
        raise TimeoutError
    return found[0]
