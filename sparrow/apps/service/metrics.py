"""What a process of the service counts, for Prometheus. Files of the client's multiprocess mode may
hold it.
"""

from __future__ import annotations

import threading
from collections import Counter as Sums
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from sparrow.core.arrays import Float32s
from sparrow.serving.card import BINS

STAGES = ("read", "wait", "encode", "score", "write")
SWAP_STAGES = ("load", "check", "flip")
_SECONDS = (1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
_LONG_SECONDS = (1e-3, 0.01, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 300, 1800)
_COUNTS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000)
ENDS = [f"{end / BINS:g}" for end in range(1, BINS + 1)]  # of bins of scores


class Counted(Protocol):
    """What counts by itself, as rows on an SSD do.

    table: whose. counters: what -> how many so far.
    """

    table: str

    @property
    def counters(self) -> Mapping[str, int]:
        """So far."""
        ...


class Tally:
    """A counter of much: sums are kept here until `flush`. A lock for each column and bin would
    cost as scoring does.

    Args:
        counter: gets the sums.
    """

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._sums = Sums[tuple[str, str]]()
        self._lock = threading.Lock()

    def add(self, counts: Mapping[tuple[str, str], int]) -> None:
        """Count. counts: values of the counter's two labels -> how many."""
        with self._lock:
            self._sums.update(counts)

    def flush(self) -> None:
        """Hand the sums to the counter."""
        with self._lock:
            sums = self._sums
            self._sums = Sums()
        for labels, count in sums.items():
            self._counter.labels(*labels).inc(count)


class Metrics:
    """The counters of one process. Their labels are names of the model and of the service, never of
    a request.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        options: dict[str, Any] = {"namespace": "sparrow", "registry": self.registry}
        self.requests = Counter(
            "requests", "Answers, by route and HTTP status", ("route", "status"), **options
        )
        self.candidates = Histogram(
            "candidates", "Candidates of a scored request", buckets=_COUNTS, **options
        )
        self.batch = Histogram(
            "batch_requests", "Requests that were scored together", buckets=_COUNTS[:8], **options
        )
        self.queue = Gauge(
            "queue_requests", "Requests that wait", multiprocess_mode="livesum", **options
        )
        self.lookups = Counter(
            "lookups",
            "Keys that were looked up, by store and outcome",
            ("store", "outcome"),
            **options,
        )
        self.lookup_s = Histogram(
            "lookup_seconds",
            "Time of a request in a lookup",
            ("store",),
            buckets=_SECONDS,
            **options,
        )
        self.swaps = Counter("swaps", "New models, by outcome", ("outcome",), **options)
        self.deaths = Counter(
            "worker_deaths", "Workers that have died, and were started again", **options
        )
        self.hangs = Counter(
            "worker_hangs", "Workers that were killed because they hung", **options
        )
        self.served_log = Counter(
            "served_log_rows", "Rows for the served log, by outcome", ("outcome",), **options
        )
        seconds = Histogram(
            "stage_seconds", "Time of a request in a stage", ("stage",), buckets=_SECONDS, **options
        )
        self.stages = {stage: seconds.labels(stage) for stage in STAGES}
        seconds = Histogram(
            "swap_seconds",
            "Time of a swap in a stage",
            ("stage",),
            buckets=_LONG_SECONDS,
            **options,
        )
        self.swap_stages = {stage: seconds.labels(stage) for stage in SWAP_STAGES}
        self.odd = Tally(
            Counter(
                "odd_values",
                "Values that were missing, unknown or far times",
                ("kind", "column"),
                **options,
            )
        )
        read_help = "Values that were read, and so could be missing, unknown or far times"
        self.read = Tally(Counter("read_values", read_help, ("kind", "column"), **options))
        self._scores = Tally(
            Counter("scores", "Scores, by label and end of their bin", ("label", "bin"), **options)
        )

        self._ssd = Tally(
            Counter(
                "ssd", "What tables on an SSD were asked, by table", ("table", "what"), **options
            )
        )
        self.on_ssd: Callable[[], Sequence[Counted]] = tuple
        self._last_counters: WeakKeyDictionary[Counted, Mapping[str, int]] = WeakKeyDictionary()

    def count_scores(self, labels: Sequence[str], scores: Sequence[Float32s]) -> None:
        """Count the scores [N, T] of some requests in BINS bins over (0, 1), as a model's card
        does.
        """
        bins_NT = np.minimum((np.concatenate(scores) * BINS).astype(np.int64), BINS - 1)
        for t, label in enumerate(labels):
            counts = np.bincount(bins_NT[:, t])
            self._scores.add({(label, ENDS[b]): int(counts[b]) for b in np.flatnonzero(counts)})

    def flush(self) -> None:
        """Make what was counted readable. Call it each second, and when a version begins to
        answer.
        """
        for source in self.on_ssd():
            now = source.counters
            before = self._last_counters.get(source, {})
            self._ssd.add(
                {
                    (source.table, counter): count - before.get(counter, 0)
                    for counter, count in now.items()
                }
            )
            self._last_counters[source] = now
        for tally in (self.odd, self.read, self._scores, self._ssd):
            tally.flush()
