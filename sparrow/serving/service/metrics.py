"""What a service counts, for Prometheus."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

STAGES = ("read", "wait", "encode", "score", "write")
_SECONDS = (1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
_COUNTS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000)


class Metrics:
    """The counters of one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        of: dict[str, Any] = {"namespace": "sparrow", "registry": self.registry}
        self.requests = Counter("requests", "Answers, by route and HTTP status", ("route", "status"), **of)
        self.candidates = Histogram("candidates", "Candidates of a scored request", buckets=_COUNTS, **of)
        self.batch = Histogram("batch_requests", "Requests that were scored together", buckets=_COUNTS[:8], **of)
        self.queue = Gauge("queue_requests", "Requests that wait", multiprocess_mode="livesum", **of)
        self.odd = Counter("odd_values", "Values that were missing or unknown", ("kind", "column"), **of)
        self.swaps = Counter("swaps", "New models, by outcome", ("outcome",), **of)
        seconds = Histogram("stage_seconds", "Time of a request in a stage", ("stage",), buckets=_SECONDS, **of)
        self.stages = {stage: seconds.labels(stage) for stage in STAGES}

    def text(self) -> bytes:
        """Returns all of it as Prometheus reads it."""
        return generate_latest(self.registry)
