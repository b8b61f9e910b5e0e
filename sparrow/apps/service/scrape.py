"""What Prometheus reads: what all processes counted, and what is computed from it when it is
read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from sparrow.apps.service.metrics import ENDS
from sparrow.features.schema import Schema

LEAST = 1_000  # scores of which the index is told: chance alone makes it about 9 / scores
_SCORES = "sparrow_scores"


class Scrape(Collector):
    """The one who answers `/metrics`. Each service has one.

    Args:
        source: the registry of the only process, or `worker_registry`.
    """

    def __init__(self, source: CollectorRegistry) -> None:
        self._source = source
        self._version: tuple[str, str, str] | None = None
        self._shares: dict[tuple[str, str], float] = {}
        self._trained: dict[str, list[int]] = {}
        self._before: dict[tuple[str, str], float] = {}

    def serves(self, version: str, model: str, step: int, folder: Path) -> None:
        """Name the version that answers from now on. What was scored before does not count in its
        index.

        Args:
            version, model, step: its names.
            folder: the model's, or its last delta. Where it cannot be read any more, nothing is
                told of training.
        """
        self._version = (version, model, str(step))
        self._shares = {}
        self._trained = {}
        with suppress(OSError, ValueError, LookupError):  # a UserError is a ValueError
            card = json.loads((folder / "card.json").read_bytes())["training"]
            columns = Schema.load(folder / "schema.toml").columns
            for name, shares in card["features"].items():
                for kind, share in shares.items() if columns[name].transform != "missing" else ():
                    at = (kind, columns[name].source or name)
                    # two features may read one column
                    self._shares[at] = max(share, self._shares.get(at, 0.0))
            self._trained = card["scores"]
        self._before = _scores(self._source.collect())

    def text(self) -> bytes:
        """Returns all of it as Prometheus reads it."""
        return generate_latest(self)

    def collect(self) -> Iterable[Metric]:
        """Gives what was counted, and then what is computed."""
        metrics = list(self._source.collect())
        yield from metrics
        if self._version is None:
            return
        gauge = GaugeMetricFamily
        version = gauge(
            "sparrow_version_info", "The model that answers", labels=("version", "model", "step")
        )
        version.add_metric(self._version, 1)
        share = gauge(
            "sparrow_training_share", "Share of odd values in training", labels=("kind", "column")
        )
        for at, value in self._shares.items():
            share.add_metric(at, value)
        trained = gauge(
            "sparrow_training_scores", "Scores of training rows, by bin", labels=("label", "bin")
        )
        index = gauge(
            "sparrow_score_psi",
            "Population stability index of scores against training",
            labels=("label",),
        )
        now = _scores(metrics)
        for label, counts in self._trained.items():
            for end, count in zip(ENDS, counts, strict=True):
                trained.add_metric((label, end), count)
            served = [
                now.get((label, end), 0.0) - self._before.get((label, end), 0.0) for end in ENDS
            ]
            index.add_metric(
                (label,), psi(counts, served) if sum(served) >= LEAST else float("nan")
            )
        yield from (version, share, trained, index)


def worker_registry(folder: Path) -> CollectorRegistry:
    """Returns a registry that joins what processes wrote to PROMETHEUS_MULTIPROC_DIR, a folder.

    Tell prometheus_client's `mark_process_dead` of each that has ended: then its gauges go, and its
    counters stay.
    """
    registry = CollectorRegistry()
    MultiProcessCollector(registry, str(folder))
    return registry


def psi(training: Sequence[float], served: Sequence[float], groups: int = 10) -> float:
    """Returns the population stability index of two histograms with the same bins, sum of (q - p)
    ln(q / p).

    Bins are joined to at most `groups` groups, cut at the quantiles of training. Half a score is
    added to each, so that none is empty. A common reading: below 0.1 little has changed, above 0.25
    much.

    Source: B. Yurdakul, "Statistical Properties of Population Stability Index" (Western Michigan
    University, 2018).
    """
    p_B = np.array(training, np.float64)
    q_B = np.array(served, np.float64)
    before_B = np.cumsum(p_B) - p_B
    group_B = np.minimum(groups * before_B / max(p_B.sum(), 1), groups - 1).astype(np.int64)
    shares = []
    for counts_B in (p_B, q_B):
        counts_G = np.bincount(group_B, counts_B)[np.unique(group_B)] + 0.5
        shares.append(counts_G / counts_G.sum())
    p_G, q_G = shares
    return float(((q_G - p_G) * np.log(q_G / p_G)).sum())


def _scores(metrics: Iterable[Metric]) -> dict[tuple[str, str], float]:
    """Returns (label, bin) -> how many scores were counted."""
    samples = [sample for metric in metrics if metric.name == _SCORES for sample in metric.samples]
    return {
        (s.labels["label"], s.labels["bin"]): s.value
        for s in samples
        if s.name == f"{_SCORES}_total"
    }
