"""How good click probabilities are. Here `score` always means a probability in 0..1, never a logit."""

from sparrow.metrics._columns import labelled
from sparrow.metrics.across import folded, merged
from sparrow.metrics.evaluation import evaluate, evaluate_labels
from sparrow.metrics.likelihood import CLAMP, calibration, logloss, logloss_from_logits, ne
from sparrow.metrics.places import topk
from sparrow.metrics.ranking import GroupedAUC, auc, auc_by_group, gauc
from sparrow.metrics.streaming import Reliability, Streaming, ece

__all__ = [
    "CLAMP",
    "GroupedAUC",
    "Reliability",
    "Streaming",
    "auc",
    "auc_by_group",
    "calibration",
    "ece",
    "evaluate",
    "evaluate_labels",
    "folded",
    "gauc",
    "labelled",
    "logloss",
    "logloss_from_logits",
    "merged",
    "ne",
    "topk",
]
