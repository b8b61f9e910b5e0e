"""Logloss, normalised entropy (NE), calibration and expected calibration error of rows in
memory.
"""

from __future__ import annotations

import math

from torch import Tensor
from torch.nn import functional as F

from sparrow.metrics._columns import check_probabilities, columns
from sparrow.metrics._logloss import base_logloss, log_odds_and_loss
from sparrow.metrics.streaming import ECE_BINS, Streaming, residuals


def logloss(scores_B: Tensor, labels_B: Tensor, weights_B: Tensor | None = None) -> float:
    """Returns the mean logloss in nats, sum_b w_b l_b / sum_b w_b; NaN without rows.

    Args:
        scores_B: probabilities, [B]; they are moved into [CLAMP, 1 - CLAMP].
        labels_B: 0..1, [B]. A row with a label y is y of its weight a click, and 1 - y of it none.
        weights_B: >= 0, [B]; ones by default.

    Raises:
        UserError: for scores outside 0..1.
    """
    scores_B, labels_B, weights_B = columns(scores_B, labels_B, weights_B)
    check_probabilities(scores_B)
    return _ratio(weights_B @ log_odds_and_loss(scores_B, labels_B)[1], weights_B.sum())


def logloss_from_logits(
    logits_B: Tensor, labels_B: Tensor, weights_B: Tensor | None = None
) -> float:
    """Returns the mean logloss in nats of logits [B]. Nothing is clamped, so it is exact at any
    size; see `logloss`.
    """
    logits_B, labels_B, weights_B = columns(logits_B, labels_B, weights_B)
    loss_B = F.binary_cross_entropy_with_logits(logits_B, labels_B, reduction="none")
    return _ratio(weights_B @ loss_B, weights_B.sum())


def ne(
    scores_B: Tensor,
    labels_B: Tensor,
    weights_B: Tensor | None = None,
    *,
    base_rate: float | None = None,
) -> float:
    """Returns the normalised entropy: the logloss divided by that of always predicting the base
    rate. Lower is better.

    It is NaN when the base rate is 0 or 1. Source: He et al. 2014, Practical lessons from
    predicting clicks on ads at Facebook, section 2.

    Args:
        scores_B, labels_B, weights_B: as for `logloss`.
        base_rate: by default the weighted mean label of the rows.

    Raises:
        UserError: as `logloss`.
    """
    loss = logloss(scores_B, labels_B, weights_B)
    _, labels_B, weights_B = columns(scores_B, labels_B, weights_B)
    mass, clicks = float(weights_B.sum()), float(weights_B @ labels_B)
    return loss / base_logloss(mass, clicks, base_rate) if mass else math.nan


def calibration(scores_B: Tensor, labels_B: Tensor, weights_B: Tensor | None = None) -> float:
    """Returns predicted clicks divided by clicks, sum_b w_b p_b / sum_b w_b y_b; 1 is best, NaN
    without clicks.

    Arguments and errors are those of `logloss`. Source: He et al. 2014, section 2.
    """
    scores_B, labels_B, weights_B = columns(scores_B, labels_B, weights_B)
    check_probabilities(scores_B)
    return _ratio(weights_B @ scores_B, weights_B @ labels_B)


def ece(scores_B: Tensor, labels_B: Tensor, weights_B: Tensor | None = None) -> float:
    """Returns the expected calibration error: how far the mean prediction of like scores is from
    their mean label.

    It is sum_q |sum of w_b (p_b - y_b) in q| / sum_b w_b, over 20 ranges q of scores that hold
    about equal weight. Equal scores are in one range. 0 is best, but noise alone gives more than 0.
    It is NaN without rows, and when a score is NaN. Source: Nixon et al. 2019, Measuring
    calibration in deep learning (the adaptive calibration error).

    Args:
        scores_B: probabilities, [B].
        labels_B: 0..1, [B]; see `auc`.
        weights_B: >= 0, [B]; ones by default.

    Raises:
        UserError: for scores outside 0..1, other shapes, and impossible labels or weights.
    """
    return ece_and_signs(*columns(scores_B, labels_B, weights_B))[0]


def ece_and_signs(scores_B: Tensor, labels_B: Tensor, weights_B: Tensor) -> tuple[float, Tensor]:
    """Returns `ece`, and whether the range of each row predicts too much (1), too little (-1) or
    right (0), [B].
    """
    stream = Streaming()
    stream.update(scores_B, labels_B, weights_B)
    bin_B = stream.quantiles(scores_B, ECE_BINS)
    sums = residuals(bin_B, scores_B, labels_B, weights_B)
    mass = float(sums[-1])
    return float(sums[:-1].abs().sum()) / mass if mass else math.nan, sums.sign()[bin_B]


def _ratio(above: Tensor, below: Tensor) -> float:
    return float(above) / float(below) if below else math.nan
