"""Requests that wait -> batches -> scores. A free scorer takes what is there: nobody waits while one is idle."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from sparrow.core.arrays import Float32s
from sparrow.serving.scorer import Crossed
from sparrow.serving.service.asked import Asked
from sparrow.serving.service.gaps import Gaps, gaps, values
from sparrow.serving.service.limits import Limits, RefusedError
from sparrow.serving.service.metrics import Metrics
from sparrow.serving.service.settings import Settings
from sparrow.serving.service.versions import Version, Versions
from sparrow.serving.ssd import UnreadableError

_SPARE = 0.5  # of the time that is left is for what is not predicted: sockets, the event loop, a busy machine
FAILED = "the service failed, and its log says why"
UNREADABLE = "rows that it needs cannot be read, and the service's log says which; ask again when they are mended"
_log = logging.getLogger(__name__)


class Answer(NamedTuple):
    """What became of a request.

    scores_NT: probabilities float32, in the candidates' order. users: what the store of users had, see `Users`.
    """

    scores_NT: Float32s
    gaps: Gaps
    version: Version
    users: str | None = None


@dataclass(eq=False, kw_only=True, slots=True)
class Waiting:
    """A request on its way.

    Args:
        asked: it.
        begun, deadline: `time.perf_counter` of its arrival, and when it is too late.
        future: gets the answer, on the event loop.
        version: that answers it, from when a scorer has taken it until `Batcher.done`.
        id: of the request, for the log.
        work_s: what it adds to the time of those before it.
        is_gone: nobody waits for it any more.
    """

    asked: Asked
    begun: float
    deadline: float
    future: asyncio.Future[Answer]
    queued: float = field(default_factory=time.perf_counter)
    version: Version | None = None
    id: str = ""
    work_s: float = 0.0
    is_gone: bool = False

    def is_late(self, now: float, cost_s: float) -> bool:
        """Whether it cannot be answered in time, because of those before it. What is itself too large is tried."""
        waited = now - self.begun > cost_s
        return now + (cost_s if waited else 0.0) >= self.deadline


class Batcher:
    """Scores requests in threads of its own.

    Args:
        versions: the model.
        limits: of the service.
        metrics: count what happens.
        settings: of the service.
    """

    def __init__(self, versions: Versions, limits: Limits, metrics: Metrics, settings: Settings) -> None:
        self._versions, self._limits, self._metrics = versions, limits, metrics
        self._is_batching = settings.is_batching
        self._queue: deque[Waiting] = deque()
        self._work_s = 0.0  # of those in the queue
        self._ready, self._closing = threading.Condition(), False
        self._threads = [
            threading.Thread(target=self._work, name=f"scorer-{i}", daemon=True) for i in range(settings.threads)
        ]
        for thread in self._threads:
            thread.start()

    def check(self, begun: float) -> None:
        """Refuse a request early when those that wait take too long for it: then nothing is spent on its body.

        Args:
            begun: `time.perf_counter` of its arrival.

        Raises:
            RefusedError: as `put`.
        """
        with self._ready:
            self._refuse_late(begun, begun + self._limits.deadline_ms / 1e3)

    def _refuse_late(self, now: float, deadline: float) -> None:
        wait_s = self._work_s / len(self._threads)
        if self._queue and now + wait_s > deadline - _SPARE * (deadline - now):
            told = f"deadline: {len(self._queue)} requests wait, which take {1e3 * wait_s:.0f} ms; try again later"
            raise RefusedError(503, told)

    def put(self, asked: Asked, begun: float, id: str = "") -> Waiting:
        """Returns a request that waits. Its future gets the answer or a `RefusedError`. Call `done` with it then.

        Args:
            asked: it.
            begun: `time.perf_counter` of its arrival.
            id: see `Waiting`.

        Raises:
            RefusedError: when too many wait, or when those that wait take too long for it.
        """
        loop = asyncio.get_running_loop()
        allowed_ms = min(asked.deadline_ms or math.inf, self._limits.deadline_ms)
        deadline, future = begun + allowed_ms / 1e3, loop.create_future()
        made = Waiting(asked=asked, begun=begun, deadline=deadline, future=future, id=id)
        if not asked.count:
            made.version = version = self._versions.hold(1)
            scores_NT = np.empty((0, len(version.scorer.labels)), np.float32)
            made.future.set_result(Answer(scores_NT, Gaps({}, {}), version))
            return made
        with self._ready:
            if self._closing or len(self._queue) >= self._limits.queue:
                raise RefusedError(429, f"queue: {len(self._queue)} requests wait, which is the most; try again later")
            self._refuse_late(made.queued, made.deadline)
            cost = self._versions.current.cost
            made.work_s = cost(asked.count) - (cost(0) if cost.is_worth(asked.count) else 0.0)  # a batch has one a
            self._work_s += made.work_s
            self._queue.append(made)
            self._metrics.queue.set(len(self._queue))
            self._ready.notify()
        return made

    def done(self, waiting: Waiting) -> None:
        """Say that the answer of a request has been written, or that nobody waits for it."""
        with self._ready:
            waiting.is_gone, version, waiting.version = True, waiting.version, None
        if version is not None:
            self._versions.release(version)

    def close(self) -> None:
        """End the threads, after they have scored what waits."""
        with self._ready:
            self._closing = True
            self._ready.notify_all()
        for thread in self._threads:
            thread.join()

    # -- in the threads --------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            with self._ready:
                self._ready.wait_for(lambda: self._queue or self._closing)
                if not self._queue:
                    return
                batch, late = self._taken()
                self._metrics.queue.set(len(self._queue))
            for one in late:
                ms = round(1e3 * (time.perf_counter() - one.queued))
                _tell(one, RefusedError(503, f"deadline: passed after {ms} ms in the queue; try again later"))
            if batch:
                assert batch[0].version is not None
                self._answer(batch[0].version, batch)

    def _taken(self) -> tuple[list[Waiting], list[Waiting]]:
        """Takes from the queue: a batch around its oldest request, and those that are too late.

        More requests of its kind join in their order, while the predicted time keeps all within their deadlines.
        """
        now, version = time.perf_counter(), self._versions.hold(0)
        batch: list[Waiting] = []
        late, left, count, end = [], [], 0, math.inf
        for one in self._queue:
            size = one.asked.count
            if one.is_gone or one.future.done():  # who waited for it has gone
                continue
            if one.is_late(now, version.cost(size)):
                late.append(one)
            elif not batch:
                batch, count, end = [one], size, one.deadline
            elif (
                self._is_batching
                and one.asked.kind == batch[0].asked.kind
                and version.cost.is_worth(size)
                and version.cost.is_worth(batch[0].asked.count)
                and count + size <= self._limits.candidates
                and now + version.cost(count + size) <= min(end, one.deadline)
            ):
                batch.append(one)
                count, end = count + size, min(end, one.deadline)
            else:
                left.append(one)
        self._queue = deque(left)
        self._work_s = sum(one.work_s for one in left)
        version = self._versions.hold(len(batch))
        for one in batch:
            one.version = version
        return batch, late

    def _answer(self, version: Version, batch: Sequence[Waiting]) -> None:
        """Score a batch. Where a request cannot be scored, each is scored alone, so that it fails alone."""
        asked, begun = [one.asked for one in batch], time.perf_counter()
        try:
            crossed = version.scorer.crossed([(one.user, one.candidates) for one in asked], version.items)
            encoded = time.perf_counter()
            scores = version.scorer.ranked(crossed)
            scored = time.perf_counter()
            found = gaps(version.scorer.schema, crossed, asked)
        except Exception as error:
            if len(batch) > 1:
                for one in batch:
                    self._answer(version, [one])
            elif isinstance(error, ValueError):  # a mistake of the user, or of Arrow and Python about her values
                _tell(batch[0], RefusedError(400, " ".join(str(error).split())))
            elif isinstance(error, UnreadableError):
                _log.error("%s", error, extra={"request_id": batch[0].id})
                _tell(batch[0], RefusedError(503, UNREADABLE))
            else:
                _log.exception("a request failed", extra={"request_id": batch[0].id})
                _tell(batch[0], RefusedError(500, FAILED))
            return
        version.cost.seen(sum(one.count for one in asked), scored - begun)
        try:
            self._count(batch, scores, found, crossed)
            stages = self._metrics.stages
            for one in batch:
                stages["wait"].observe(begun - one.queued)
                stages["encode"].observe(encoded - begun)
                stages["score"].observe(scored - encoded)
                self._metrics.candidates.observe(one.asked.count)
        except Exception:  # a full disk, perhaps
            _log.exception("a request could not be counted")
        for one, scores_NT, gap in zip(batch, scores, found, strict=True):
            _tell(one, Answer(scores_NT, gap, version))

    def _count(self, batch: Sequence[Waiting], scores: list[Float32s], found: list[Gaps], crossed: Crossed) -> None:
        """Count what a batch had and got. Trials do not count."""
        metrics, version = self._metrics, batch[0].version
        metrics.batch.observe(len(batch))
        if version is None or batch[0].asked.is_trial:
            return
        metrics.scored(version.scorer.labels, scores)
        metrics.read.add(values(version.scorer.schema, crossed))
        for gap in found:
            metrics.odd.add({("missing", column): count for column, count in gap.missing.items()})
            metrics.odd.add({("unknown", column): count for column, count in gap.unknown.items()})
        if crossed.known is not None:
            unknown = int(crossed.known.unknown_B.sum())
            metrics.lookups.labels("items", "absent").inc(unknown)
            metrics.lookups.labels("items", "found").inc(len(crossed.known.unknown_B) - unknown)


def _tell(one: Waiting, what: Answer | RefusedError) -> None:
    """Give a request its answer, on its event loop."""

    def tell() -> None:
        if one.future.done():
            return
        if isinstance(what, RefusedError):
            one.future.set_exception(what)
        else:
            one.future.set_result(what)

    one.future.get_loop().call_soon_threadsafe(tell)
