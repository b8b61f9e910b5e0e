"""Who is missing when a rank waits in vain: every rank says some times a second what it is at."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch.distributed as dist

EVERY_S = 0.5
PATIENCE_S = 4 * EVERY_S  # without a word for so long a rank is gone, or stopped


class Watch:
    """Tells the job's store what this rank is at, from a thread of its own; asks it about the others after a failure.

    where: what this rank is at now.
    """

    def __init__(self, rank: int, size: int, where: Callable[[], str]) -> None:
        self.rank, self.size, self._where = rank, size, where
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        client = dist.TCPStore(host, port, is_master=False, wait_for_workers=False)  # its own: the job's may be waiting
        self._store = dist.PrefixStore(f"sparrow/watch/{attempt}", client)
        self._beats = 0
        self._done = threading.Event()
        self._tell()
        threading.Thread(target=self._run, daemon=True, name="watch").start()

    def _run(self) -> None:
        with suppress(Exception):  # the store goes with the job
            while not self._done.wait(EVERY_S):
                self._tell()

    def _tell(self) -> None:
        self._beats += 1
        self._store.set(str(self.rank), json.dumps({"beat": self._beats, "at": self._where()}))

    def stop(self) -> None:
        """No more."""
        self._done.set()

    def explain(self, error: Exception) -> str:
        """One line on a failed collective: which ranks are gone, or else which are elsewhere than this one."""
        mine = self._where()
        text = str(error).strip().splitlines()
        why = text[0][:200] if text else type(error).__name__
        try:
            before = self._all()
            time.sleep(PATIENCE_S)
            now = self._all()
        except Exception:
            return f"rank {self.rank} at {mine}: the job's store is gone, with the host that had it ({why})"
        gone = [r for r in range(self.size) if r != self.rank and now[r].get("beat") == before[r].get("beat")]
        if gone:
            told = ", ".join(f"rank {r} (last at {now[r].get('at', 'its start')})" for r in gone)
            return f"{told} {'is' if len(gone) == 1 else 'are'} gone or stopped; rank {self.rank} was at {mine} ({why})"
        late = [r for r in range(self.size) if now[r].get("at") != mine]
        told = ", ".join(f"rank {r} is at {now[r].get('at')}" for r in late) or "all ranks are there"
        return f"rank {self.rank} waited in vain at {mine}: {told} ({why})"

    def _all(self) -> list[dict[str, Any]]:
        found = []
        for rank in range(self.size):
            known = self._store.check([str(rank)])
            found.append(json.loads(self._store.get(str(rank))) if known else {})
        return found
