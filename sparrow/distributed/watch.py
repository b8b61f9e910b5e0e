"""Finds out who is missing when a rank waits in vain. Every rank says several times a second what
it is doing.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from sparrow.core.errors import listed
from sparrow.distributed.waits import Waits

T = TypeVar("T")
EVERY_S = 0.5
STORE = timedelta(seconds=5)  # the store of a small job answers within this time
EACH = timedelta(seconds=0.05)  # for every rank in addition: the store answers one at a time
PATIENCE_S = 6 * EVERY_S  # a rank that says nothing for so long is gone, or stopped
ENOUGH = 3  # words of each rank that speaks, see `_silent`
SILENT_S = 10.0  # a rank that says nothing for so long is not waited for any longer
WAITED = 2  # a rank asks about the others when it has waited for so many of its own words


Words = dict[str, Any]
"""What a rank said last: "beat", "at", "host" and "pid"; "why" when it ended by an error, "left"
when it ended well.
"""


class Watch:
    """Tells the job's store what this rank is doing, from its own thread. After a failure it asks
    about the others.

    Each rank also listens to the next one that is still there. When that one is silent for SILENT_S
    while this rank waits, it finds out who is silent, tells the others, and ends its own waits. It
    counts by its own words and not by a clock. So a machine that was asleep, or is too busy to let
    anybody speak, is no alarm.

    Args:
        job: a name that no other job had.
        rank: this one.
        size: how many ranks there are.
        where: returns what this rank is doing now.
        timeout: within it, it is connected.
        waits: what this rank waits for.
    """

    def __init__(
        self,
        job: str,
        rank: int,
        size: int,
        where: Callable[[], str],
        timeout: timedelta = STORE,
        waits: Waits | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self._where = where
        host = os.environ["MASTER_ADDR"]
        port = int(os.environ["MASTER_PORT"])
        # its own client, because the other may be waiting; connecting may take long: torch asks for
        # the host's name
        client = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
        self._limit = STORE + size * EACH
        client.set_timeout(self._limit)
        self._store = dist.PrefixStore(f"sparrow/watch/{job}", client)
        self._waits = waits or Waits()
        self._waited = 0  # times that the clock has found this rank in one wait
        self._next = (rank + 1) % size
        self._heard: object = None  # the last words of the next rank
        self._quiet = 0  # own words since
        self._before: list[Words] = []  # what all had said when the next rank became suspect
        self._rank0: Words = {}  # what rank 0 said first
        # torchrun's own may be stopped by its shell while the ranks go on
        self._is_rank0s = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        self._beats = 0
        self._answers = 0  # of the store
        self._done = threading.Event()
        self._tell()
        self._thread = threading.Thread(target=self._run, daemon=True, name="watch")
        self._clock = threading.Thread(target=self._count, daemon=True, name="watch's clock")
        self._thread.start()
        self._clock.start()

    def _run(self) -> None:
        while not self._done.wait(EVERY_S):
            try:
                self._tell()
                self._listen()
                self._answers += 1
            except dist.DistNetworkError:  # the store ends with the job
                return
            except RuntimeError:  # it was late, and may answer the next time
                continue

    def _tell(self, **more: Any) -> None:
        words = {"at": self._where(), "host": HOST, "pid": os.getpid(), **more}
        self._store.set(str(self.rank), json.dumps({"beat": self._beats + 1, **words}))
        self._beats += 1

    def _listen(self) -> None:
        """Listen to the next rank, and look closely when it is silent and waited for."""
        self._rank0 = self._rank0 or self._words(0)
        words = self._words(self._next)
        if _ended(words) and not _failed(words):
            self._next = (self._next + 1) % self.size
            words = {}
        self._quiet = self._quiet + 1 if words.get("beat") == self._heard else 0
        self._heard = words.get("beat")
        if self._waited < WAITED or self._waits.reason:
            self._before = []
        elif self._store.check(["found"]):
            self._waits.end(self._store.get("found").decode())
        elif _failed(words):
            self._warn(f"rank {self._next} ended at {words['at']}: {words['why']}")
        elif self._heard is None or self._quiet * EVERY_S < SILENT_S - PATIENCE_S:
            self._before = []
        elif not self._before:
            self._before = self._last_words()
        elif self._quiet * EVERY_S >= SILENT_S:
            self._look_closely()

    def _look_closely(self) -> None:
        """End the waits of this rank, if ranks have said nothing since the next one became
        suspect.
        """
        now = self._last_words()
        silent = self._silent(self._before, now)
        if silent is None:
            return
        self._quiet = 0
        self._before = []
        if silent:
            self._warn(f"{_named(silent, now)} (no word for {SILENT_S:g} s)")

    def _words(self, rank: int) -> Words:
        """Returns what a rank said last; {} if it never said anything, for which the store would
        make us wait.
        """
        key = str(rank)
        words: Words = json.loads(self._store.get(key)) if self._store.check([key]) else {}
        return words

    def _warn(self, explanation: str) -> None:
        """Tell the others what this rank has found out, and end its waits."""
        if self._store.add("asked", 1) == 1 or not self._store.check(["found"]):
            self._store.set("found", explanation)
        self._waits.end(explanation)

    def _count(self) -> None:
        """Count how long this rank waits. A store that is silent as long as that is rank 0's, which
        is stopped.
        """
        waiting = answers = silent = 0
        while not self._done.wait(EVERY_S):
            before = waiting
            waiting = self._waits.oldest
            self._waited = self._waited + 1 if waiting and waiting == before else 0
            before = answers
            answers = self._answers
            silent = silent + 1 if answers == before else 0
            is_lost = (
                self._is_rank0s and self.rank and min(silent, self._waited) * EVERY_S >= SILENT_S
            )
            if is_lost and (state := _state(self._rank0)) != "alive":
                self._waits.end(
                    f"rank 0, which holds the job's store, is {state} (no word for {SILENT_S:g} s)"
                )
                return

    def end(self, why: str, waited: bool = False) -> None:
        """Tell the others that this rank ends, and why. waited: whether it ends because of another
        rank.
        """
        self.stop()
        if not self._thread.is_alive():  # a living thread would hold the connection
            with suppress(Exception):
                self._in_time(lambda: self._tell(why=why, waited=waited))

    def leave(self) -> None:
        """Tell the others that this rank is here no longer, and that nothing is wrong."""
        self.stop()
        if not self._thread.is_alive():
            with suppress(Exception):  # the store may have ended before
                self._in_time(lambda: self._tell(left=True))

    def stop(self) -> None:
        """Stop telling the store. A thread that still does would abort the process when the process
        ends.
        """
        if self._done.is_set():  # a store that does not answer is waited for once
            return
        self._done.set()
        self._thread.join(self._limit.total_seconds())

    def explain(self, why: str) -> tuple[str, str]:
        """Returns why a collective failed: which rank failed first, which are gone, or which are
        elsewhere.

        In one line, first without what differs between the ranks that wait, then with it.

        The rank that asks first finds out and tells the others. Together they would ask more than a
        store can answer.
        """
        place = self._where()
        try:
            if self._in_time(lambda: self._store.add("asked", 1)) > 1 and (
                answer := self._await_explanation()
            ):
                explanation = answer
            else:
                explanation = self._find()
                self._in_time(lambda: self._store.set("found", explanation))
        except TimeoutError:
            lost = "the job's store is gone, with the host that had it"
            return lost, f"rank {self.rank} at {place}: {lost} ({why})"
        return explanation, f"{explanation}; rank {self.rank} was at {place} ({why})"

    def _await_explanation(self) -> str:
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
        """Returns one line: the rank that failed first, else those silent for PATIENCE_S, else
        those elsewhere.
        """
        before = self._in_time(self._last_words)
        end = time.monotonic() + 3 * PATIENCE_S
        wait = 0 if any(_failed(words) for words in before) else PATIENCE_S
        while True:
            time.sleep(wait)
            now = self._in_time(self._last_words)
            for r, words in enumerate(now):
                if _failed(words):
                    return f"rank {r} ended at {words['at']}: {words['why']}"
            gone = self._silent(before, now, is_last=time.monotonic() > end)
            if gone is not None:
                break
            wait = EVERY_S
        if gone:
            return _named(gone, now)
        for r, words in enumerate(now):
            if "why" in words:
                return f"rank {r} gave up: {words['why']}"
        place = self._where()
        late = listed(
            [f"rank {r} is at {words['at']}" for r, words in enumerate(now) if words["at"] != place]
        )
        return f"rank {self.rank} waited in vain: {late or 'all ranks are there'}"

    def _silent(
        self, before: list[Words], now: list[Words], is_last: bool = False
    ) -> dict[int, str] | None:
        """Returns the ranks that said nothing between two times, with the state of each, see
        `_state`.

        None as long as that cannot be said: a rank counts as silent only when all that speak have
        spoken ENOUGH times, because on a busy machine all are late. One whose process this host
        sees alive does not count.

        Args:
            before: what all had said at the first time.
            now: what all have said at the second.
            is_last: whether there is no time to hear them often enough.
        """
        present = [r for r in range(self.size) if not _ended(now[r])]
        count = {r: now[r].get("beat", 0) - before[r].get("beat", 0) for r in present}
        silent = [r for r in present if not count[r]]
        heard = min((n for n in count.values() if n), default=ENOUGH)
        if silent and heard < ENOUGH and not is_last:
            return None
        states = {r: _state(now[r]) for r in silent}
        return {r: state for r, state in states.items() if state != "alive"}

    def _last_words(self) -> list[Words]:
        """Returns what every rank said last; {} for ranks that never said anything."""
        ranks = [str(rank) for rank in range(self.size)]
        if not self._store.check(ranks):  # the store would make us wait for a key that is not there
            ranks = [rank for rank in ranks if self._store.check([rank])]
        answers = dict(zip(ranks, self._store.multi_get(ranks), strict=True))
        return [json.loads(answers.get(str(rank), b"{}")) for rank in range(self.size)]

    def _in_time(self, call: Callable[[], T], more_s: float = 0.0) -> T:
        """Returns what a call to the store returns. Over a cut link it would wait for ever, in
        spite of the timeout.
        """
        results: list[T] = []

        def run() -> None:
            with suppress(Exception):
                results.append(call())

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(self._limit.total_seconds() + more_s)
        if not results:
            raise TimeoutError
        return results[0]


def _failed(words: Words) -> bool:
    return "why" in words and not words["waited"]


def _ended(words: Words) -> bool:
    return "why" in words or "left" in words


def _host() -> str:
    """Returns a name of what has one numbering of processes and one network; "" where none is
    known.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return " ".join([boot, *(os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net"))])
    except OSError:
        return ""


HOST = _host()
STATES = {"T": "stopped", "t": "stopped", "Z": "gone", "X": "gone"}  # of Linux's /proc/PID/stat


def _state(words: Words) -> str:
    """Returns whether a rank's process is "gone", "stopped" or "alive"; "gone or stopped" where
    this host cannot see.

    A process that is alive and says nothing is within a call that lets no other thread of Python
    run.
    """
    if not HOST or words.get("host") != HOST:
        return "gone or stopped"
    try:
        stat = Path(f"/proc/{words['pid']}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "gone"
    return STATES.get(stat.rpartition(")")[2].split()[0], "alive")


def _named(gone: dict[int, str], words: list[Words]) -> str:
    """Returns what is to be said of ranks that are gone or stopped."""
    last = listed([f"rank {r} (last at {words[r].get('at', 'its start')})" for r in gone])
    states = set(gone.values())
    state = states.pop() if len(states) == 1 else "gone or stopped"
    return f"{last} {'is' if len(gone) == 1 else 'are'} {state}"
