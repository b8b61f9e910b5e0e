"""How good click probabilities are. Here `score` always means a probability in 0..1, never a logit.

A run needs metrics of streams and of all rows, which are loaded. Metrics of rows in memory are
loaded when they are used, as is how certain a metric is.
"""

from typing import TYPE_CHECKING

from sparrow.core.on_use import loaded_on_use
from sparrow.metrics import declared  # noqa: F401 (it declares them)
from sparrow.metrics._columns import ColumnBuffer, labelled
from sparrow.metrics._logloss import CLAMP
from sparrow.metrics.across import folded, merged
from sparrow.metrics.evaluation import evaluate, evaluate_labels
from sparrow.metrics.metric import (
    METRICS,
    BringsMeasures,
    Metric,
    curves,
    declare,
    headlines,
    labels_of,
    metric_of,
    monitored,
)
from sparrow.metrics.ranking import GroupedAUC, auc, auc_by_group, gauc
from sparrow.metrics.streaming import Reliability, Streaming

if TYPE_CHECKING:
    from sparrow.metrics.likelihood import calibration, ece, logloss, logloss_from_logits, ne
    from sparrow.metrics.places import topk
else:
    _FILES = {
        "calibration": "likelihood",
        "ece": "likelihood",
        "logloss": "likelihood",
        "logloss_from_logits": "likelihood",
        "ne": "likelihood",
        "topk": "places",
    }
    __getattr__ = loaded_on_use(__name__, (), _FILES)

__all__ = [
    "CLAMP",
    "METRICS",
    "BringsMeasures",
    "ColumnBuffer",
    "GroupedAUC",
    "Metric",
    "Reliability",
    "Streaming",
    "auc",
    "auc_by_group",
    "calibration",
    "curves",
    "declare",
    "ece",
    "evaluate",
    "evaluate_labels",
    "folded",
    "gauc",
    "headlines",
    "labelled",
    "labels_of",
    "logloss",
    "logloss_from_logits",
    "merged",
    "metric_of",
    "monitored",
    "ne",
    "topk",
]
