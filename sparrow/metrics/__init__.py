"""How good click probabilities are. Here `score` always means a probability in 0..1, never a logit."""

from sparrow.metrics.across import folded, merged
from sparrow.metrics.evaluation import evaluate, evaluate_labels
from sparrow.metrics.likelihood import CLAMP, calibration, logloss, logloss_from_logits, ne
from sparrow.metrics.places import topk
from sparrow.metrics.ranking import GroupedAUC, auc, gauc
from sparrow.metrics.streaming import Reliability, Streaming, ece

__all__ = [
    "CLAMP",
    "GroupedAUC",
    "Reliability",
    "Streaming",
    "auc",
    "calibration",
    "ece",
    "evaluate",
    "evaluate_labels",
    "folded",
    "gauc",
    "logloss",
    "logloss_from_logits",
    "merged",
    "ne",
    "topk",
]
