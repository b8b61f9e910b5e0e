"""Requests that wait -> batches -> scores. A free scorer takes what is there: nobody waits while
one is idle.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from sparrow.apps.service.limits import Limits, RefusedError
from sparrow.apps.service.metrics import Metrics
from sparrow.apps.service.odd_values import OddValues, count_odd_values, count_read_values
from sparrow.apps.service.request import Request
from sparrow.apps.service.settings import Settings
from sparrow.apps.service.versions import Version, Versions
from sparrow.core.arrays import Float32s
from sparrow.serving.rows import UnreadableError
from sparrow.serving.scorer import Crossed

# of the time that is left is for what is not predicted: sockets, the event loop, a busy machine
_SPARE = 0.5
FAILED = "the service failed, and its log says why"
UNREADABLE = (
    "rows that it needs cannot be read, and the service's log says which; ask again when they are"
    " mended"
)
_log = logging.getLogger(__name__)


class Answer(NamedTuple):
    """What became of a request.

    scores_NT: probabilities float32, in the candidates' order. users: what the store of users had,
    see `Users`.
    """

    scores_NT: Float32s
    odd_values: OddValues
    version: Version
    users: str | None = None


@dataclass(eq=False, kw_only=True, slots=True)
class Waiting:
    """A request on its way.

    Args:
        asked: it.
        begun, deadline: `time.perf_counter` of its arrival, and when it is too late.
        future: gets the answer, on the event loop.
        version: that answers it, from when a scorer has taken it until `Batcher.finish`.
        id: of the request, for the log.
        work_s: what it adds to the time of those before it.
        is_gone: nobody waits for it any more.
    """

    request: Request
    begun: float
    deadline: float
    future: asyncio.Future[Answer]
    queued: float = field(default_factory=time.perf_counter)
    version: Version | None = None
    id: str = ""
    work_s: float = 0.0
    is_gone: bool = False

    def is_late(self, now: float, cost_s: float) -> bool:
        """Whether it cannot be answered in time, because of those before it. What is itself too
        large is tried.
        """
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

    def __init__(
        self, versions: Versions, limits: Limits, metrics: Metrics, settings: Settings
    ) -> None:
        self._versions = versions
        self._limits = limits
        self._metrics = metrics
        self._is_batching = settings.batching == "on"
        self._queue: deque[Waiting] = deque()
        self._work_s = 0.0  # of those in the queue
        self._ready = threading.Condition()
        self._closing = False
        # that each thread scores
        self._batches: list[Sequence[Waiting] | None] = [None] * settings.threads
        # of the processor time of each thread
        self._clocks: list[int | None] = [None] * settings.threads
        self._last_states: list[Any] = [None] * settings.threads
        self._threads = [
            threading.Thread(target=self._work, args=(i,), name=f"scorer-{i}", daemon=True)
            for i in range(settings.threads)
        ]
        for thread in self._threads:
            thread.start()

    def check(self, begun: float) -> None:
        """Refuse a request early when those that wait take too long for it: then nothing is spent
        on its body.

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
            reason = (
                f"deadline: {len(self._queue)} requests wait, which take {1e3 * wait_s:.0f} ms; try"
                " again later"
            )
            raise RefusedError(503, reason)

    def put(self, request: Request, begun: float, id: str = "") -> Waiting:
        """Returns a request that waits. Its future gets the answer or a `RefusedError`. Call
        `finish` with it then.

        Args:
            request: it.
            begun: `time.perf_counter` of its arrival.
            id: see `Waiting`.

        Raises:
            RefusedError: when too many wait, or when those that wait take too long for it.
        """
        loop = asyncio.get_running_loop()
        allowed_ms = min(request.deadline_ms or math.inf, self._limits.deadline_ms)
        deadline = begun + allowed_ms / 1e3
        future = loop.create_future()
        waiting = Waiting(request=request, begun=begun, deadline=deadline, future=future, id=id)
        if not request.count:
            waiting.version = version = self._versions.hold(1)
            scores_NT = np.empty((0, len(version.scorer.labels)), np.float32)
            waiting.future.set_result(Answer(scores_NT, OddValues({}, {}, {}), version))
            return waiting
        with self._ready:
            if self._closing or len(self._queue) >= self._limits.queue:
                raise RefusedError(
                    429,
                    f"queue: {len(self._queue)} requests wait, which is the most; try again later",
                )
            self._refuse_late(waiting.queued, waiting.deadline)
            cost = self._versions.current.cost
            # requests of a batch share the fixed part
            fixed_s = cost(0) if cost.is_worth(request.count) else 0.0
            waiting.work_s = cost(request.count) - fixed_s
            self._work_s += waiting.work_s
            self._queue.append(waiting)
            self._metrics.queue.set(len(self._queue))
            self._ready.notify()
        return waiting

    def finish(self, waiting: Waiting) -> None:
        """Say that the answer of a request has been written, or that nobody waits for it."""
        with self._ready:
            version = waiting.version
            waiting.version = None
            waiting.is_gone = True
        if version is not None:
            self._versions.release(version)

    def is_stuck(self) -> bool:
        """Whether a thread scores the batch of the last call still, and has not used a processor
        since.
        """
        before = self._last_states
        self._last_states = [self._state(number) for number in range(len(self._threads))]
        return any(
            now is not None and now == was
            for now, was in zip(self._last_states, before, strict=True)
        )

    def _state(self, number: int) -> tuple[int, float] | None:
        """Returns what changes while a thread scores, or None while it waits for requests."""
        batch = self._batches[number]
        clock = self._clocks[number]
        return None if batch is None or clock is None else (id(batch), time.clock_gettime(clock))

    def close(self) -> None:
        """End the threads, after they have scored what waits."""
        with self._ready:
            self._closing = True
            self._ready.notify_all()
        for thread in self._threads:
            thread.join()

    # -- in the threads ----------------------------------------------------------------------------

    def _work(self, number: int) -> None:
        if hasattr(time, "pthread_getcpuclockid"):  # macOS has none
            self._clocks[number] = time.pthread_getcpuclockid(threading.get_ident())
        while True:
            with self._ready:
                self._ready.wait_for(lambda: self._queue or self._closing)
                if not self._queue:
                    return
                batch, late = self._take_batch()
                self._metrics.queue.set(len(self._queue))
            for waiting in late:
                ms = round(1e3 * (time.perf_counter() - waiting.queued))
                _tell(
                    waiting,
                    RefusedError(
                        503, f"deadline: passed after {ms} ms in the queue; try again later"
                    ),
                )
            if batch:
                assert batch[0].version is not None
                self._batches[number] = batch
                self._answer(batch[0].version, batch)
                self._batches[number] = None

    def _take_batch(self) -> tuple[list[Waiting], list[Waiting]]:
        """Take from the queue: a batch around its oldest request, and those that are too late.

        More requests of its kind join in their order, while the predicted time keeps all within
        their deadlines.
        """
        now = time.perf_counter()
        version = self._versions.hold(0)
        batch: list[Waiting] = []
        late = []
        left = []
        count = 0
        end = math.inf
        for waiting in self._queue:
            size = waiting.request.count
            if waiting.is_gone or waiting.future.done():  # who waited for it has gone
                continue
            if waiting.is_late(now, version.cost(size)):
                late.append(waiting)
            elif not batch:
                batch = [waiting]
                count = size
                end = waiting.deadline
            elif (
                self._is_batching
                and not version.scorer.mixing
                and waiting.request.kind == batch[0].request.kind
                and version.cost.is_worth(size)
                and version.cost.is_worth(batch[0].request.count)
                and count + size <= self._limits.candidates
                and now + version.cost(count + size) <= min(end, waiting.deadline)
            ):
                batch.append(waiting)
                count = count + size
                end = min(end, waiting.deadline)
            else:
                left.append(waiting)
        self._queue = deque(left)
        self._work_s = sum(waiting.work_s for waiting in left)
        version = self._versions.hold(len(batch))
        for waiting in batch:
            waiting.version = version
        return batch, late

    def _answer(self, version: Version, batch: Sequence[Waiting]) -> None:
        """Score a batch. Where a request cannot be scored, each is scored alone, so that it fails
        alone.
        """
        requests = [waiting.request for waiting in batch]
        begun = time.perf_counter()
        try:
            crossed = version.scorer.crossed(
                [(request.user, request.candidates) for request in requests], version.items
            )
            encoded = time.perf_counter()
            scores = version.scorer.ranked(crossed)
            scored = time.perf_counter()
            odd_values = count_odd_values(version.scorer.schema, crossed, requests)
        except Exception as error:
            if len(batch) > 1:
                for waiting in batch:
                    self._answer(version, [waiting])
            elif isinstance(error, UnreadableError):
                _log.error("%s", error, extra={"request_id": batch[0].id})
                _tell(batch[0], RefusedError(503, UNREADABLE))
            elif isinstance(error, ValueError):
                # a mistake of the user, or of Arrow and Python about her values
                _tell(batch[0], RefusedError(400, " ".join(str(error).split())))
            else:
                _log.exception("a request failed", extra={"request_id": batch[0].id})
                _tell(batch[0], RefusedError(500, FAILED))
            return
        version.cost.correct(sum(request.count for request in requests), scored - begun)
        try:
            self._count(batch, scores, odd_values, crossed)
            stages = self._metrics.stages
            for waiting in batch:
                stages["wait"].observe(begun - waiting.queued)
                stages["encode"].observe(encoded - begun)
                stages["score"].observe(scored - encoded)
                self._metrics.candidates.observe(waiting.request.count)
        except Exception:  # a full disk, perhaps
            _log.exception("a request could not be counted")
        for waiting, scores_NT, odd in zip(batch, scores, odd_values, strict=True):
            _tell(waiting, Answer(scores_NT, odd, version))

    def _count(
        self,
        batch: Sequence[Waiting],
        scores: list[Float32s],
        odd_values: list[OddValues],
        crossed: Crossed,
    ) -> None:
        """Count what a batch had and got. Trials do not count."""
        metrics = self._metrics
        version = batch[0].version
        metrics.batch.observe(len(batch))
        if version is None or batch[0].request.is_trial:
            return
        metrics.count_scores(version.scorer.labels, scores)
        metrics.read.add(count_read_values(version.scorer.schema, crossed))
        for odd in odd_values:
            for kind, counts in zip(odd._fields, odd, strict=True):
                metrics.odd.add({(kind, column): count for column, count in counts.items()})
        if crossed.known is not None:
            unknown = int(crossed.known.unknown_B.sum())
            metrics.lookups.labels("items", "absent").inc(unknown)
            metrics.lookups.labels("items", "found").inc(len(crossed.known.unknown_B) - unknown)


def _tell(waiting: Waiting, outcome: Answer | RefusedError) -> None:
    """Give a request its answer, on its event loop."""

    def tell() -> None:
        if waiting.future.done():
            return
        if isinstance(outcome, RefusedError):
            waiting.future.set_exception(outcome)
        else:
            waiting.future.set_result(outcome)

    waiting.future.get_loop().call_soon_threadsafe(tell)
