"""What a metric is. Each is declared once, in `declared.py`; what names, finds, shows or draws
metrics reads it.

That is: evaluation, the run log, `--loop.monitor`, the search, comparisons, reports, tables and
pictures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from sparrow.core.errors import UserError

if TYPE_CHECKING:  # they read METRICS; and help names metrics without torch
    from torch import Tensor

    from sparrow.distributed import World

# what is smaller matters to nobody: other threads or ranks of the same run change the seventh digit
LEAST = 1e-4


@runtime_checkable
class BringsMeasures(Protocol):
    """A model that is judged by more than its scores, such as by the loss of each row's tokens.

    measures: the names of the numbers that it measures of each row. Metrics are made of their sums,
    see `Metric`.
    """

    measures: tuple[str, ...]

    def measure(self) -> Tensor:
        """Returns the numbers of the rows that `forward` was last given, [B, M], without a
        graph.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A metric of probabilities, or of what a model measures of each row.

    Args:
        name: as files and settings have it.
        title: as pictures and reports have it.
        short: the title where there is little room; by default the title.
        meaning: a sentence for reports; "" where the name says it.
        better: which values are better. "near 1" orders no two models: an interval does not say
            which is nearer.
        stream: its value of a `Streaming`, in constant memory; None where a stream cannot tell it.
        exact: its value of the rows of all ranks. The arguments are those of `auc_across`. None
            where the stream's value is exact.
        influence: its value of `JudgedRows`, and by how much each row moves it, float64 [B], or
            with `needs_groups` each group, [G]. It returns None where the metric is undefined.
        measures: names of numbers that a model measures of each row (`BringsMeasures`). Only models
            that measure all of them have the metric. `stream`, `exact` and `influence` are left
            out.
        value: its value, float64 [], of the sums of `measures` over rows, float64 [] each. Each row
            is in the sums as often as its weight says. It is a ratio, or made of ratios: twice the
            sums have the same value. Torch finds its slopes, which say how certain it is.
        needs_groups: whether it is of rows within a session. Its exact value is then found by
            `groups_across`.
        is_logged: whether lines of the run log and of progressive validation have the stream's
            value.
        is_monitored: whether `--loop.monitor` may name it.
        is_headline: whether a report begins with it, and pictures of slices, of windows and of the
            run log show it.
        least_share: the share of its value below which a difference matters to nobody, for one that
            is small where positives are rare; by default it is LEAST, whatever the value.
    """

    name: str
    title: str
    short: str = ""
    meaning: str = ""
    better: Literal["lower", "higher", "near 1"]
    stream: Callable[[Any], float] | None = None
    exact: Callable[[World, Any, Tensor, Tensor, Tensor], float] | None = None
    influence: Callable[[Any], tuple[float, Tensor] | None] | None = None
    measures: tuple[str, ...] = ()
    value: Callable[..., Tensor] | None = None
    needs_groups: bool = False
    is_logged: bool = False
    is_monitored: bool = False
    is_headline: bool = False
    least_share: float | None = None

    def __post_init__(self) -> None:
        assert self.better != "near 1" or not self.is_monitored, (
            f"{self.name}: it orders no two models"
        )
        assert self.influence or self.value or not self.is_headline, (
            f"{self.name}: a report shows intervals"
        )
        assert self.stream or self.value or not self.is_logged, (
            f"{self.name}: the run log has values of streams"
        )

    @property
    def label(self) -> str:
        """Its title where there is little room."""
        return self.short or self.title

    def cost(self, value: float) -> float:
        """Returns a number that is lower for a better value."""
        return value if self.better == "lower" else -value

    def floor(self, value: float) -> float:
        """Returns up to which difference from a value the metric counts as equal."""
        return LEAST if self.least_share is None else self.least_share * value


METRICS: dict[str, Metric] = {}
"""Each metric by its name, in the order in which they are shown."""

KS = (5, 10)  # how many places count in recall@k, NDCG@k and hit rate@k


def declare(*metrics: Metric) -> None:
    """Add metrics to METRICS."""
    for metric in metrics:
        assert metric.name not in METRICS, f"{metric.name} is declared twice"
        METRICS[metric.name] = metric


def metric_of(name: str) -> Metric:
    """Returns the declaration of a metric. Those of `topk_names`, such as recall@5, are all
    alike.
    """
    return METRICS.get(name) or Metric(name=name, title=name, better="higher")


def topk_names(ks: Sequence[int] = KS) -> list[str]:
    """Returns the names of the metrics of `places`, such as recall@5, in the order in which they
    are shown.

    Raises:
        UserError: for a k below 1.
    """
    too_small = [k for k in ks if k < 1]
    if too_small:
        raise UserError(
            f"k: {too_small[0]}; recall@k looks at the first k candidates, so give 1 or more"
        )
    names = [f"{metric}@{k}" for metric in ("recall", "ndcg", "hit_rate") for k in sorted(set(ks))]
    return [*names, "mrr"]


def monitored() -> list[str]:
    """Returns the names of the metrics by which `--loop.monitor` may choose."""
    return [metric.name for metric in METRICS.values() if metric.is_monitored]


def headlines() -> list[Metric]:
    """Returns the metrics with which a report begins."""
    return [metric for metric in METRICS.values() if metric.is_headline]


def labels_of(metrics: Sequence[Metric]) -> str:
    """Returns the labels of metrics, as the title of a picture of them."""
    return ", ".join(metric.label for metric in metrics)


def curves() -> list[Metric]:
    """Returns the metrics that are drawn over time, those of which less is better first.

    The run log has them, and one end of them is the better one.
    """
    drawn = [
        metric for metric in METRICS.values() if metric.is_logged and metric.better != "near 1"
    ]
    return sorted(drawn, key=lambda metric: metric.better != "lower")
