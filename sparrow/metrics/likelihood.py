"""Logloss, normalised entropy (NE) and calibration."""

from __future__ import annotations

import math

from torch import Tensor
from torch.nn import functional as F

from sparrow.metrics._columns import check_probabilities, columns

CLAMP = 1e-7
"""Scores are moved into [CLAMP, 1 - CLAMP] before a logarithm, so that one row costs at most 16.1 nats.

It is about the distance from 1 to the next smaller float32. A sigmoid that rounds to 1.0 must not cost infinity.
"""


def log_odds_and_loss(scores_B: Tensor, labels_B: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the logit and the logloss in nats of each clamped float64 score [B]."""
    p_B = scores_B.clamp(CLAMP, 1 - CLAMP)
    log_p_B, log_q_B = p_B.log(), (-p_B).log1p()
    return log_p_B - log_q_B, -(labels_B * log_p_B + (1 - labels_B) * log_q_B)


def logloss(scores_B: Tensor, labels_B: Tensor, weights_B: Tensor | None = None) -> float:
    """Returns the mean logloss in nats, sum_b w_b l_b / sum_b w_b; NaN without rows.

    Args:
        scores_B: probabilities, [B]; they are moved into [CLAMP, 1 - CLAMP].
        labels_B: 0 or 1, [B].
        weights_B: >= 0, [B]; ones by default.

    Raises:
        UserError: for scores outside 0..1.
    """
    scores_B, labels_B, weights_B = columns(scores_B, labels_B, weights_B)
    check_probabilities(scores_B)
    return _ratio(weights_B @ log_odds_and_loss(scores_B, labels_B)[1], weights_B.sum())


def logloss_from_logits(logits_B: Tensor, labels_B: Tensor, weights_B: Tensor | None = None) -> float:
    """Returns the mean logloss in nats of logits [B]. Nothing is clamped, so it is exact at any size; see `logloss`."""
    logits_B, labels_B, weights_B = columns(logits_B, labels_B, weights_B)
    loss_B = F.binary_cross_entropy_with_logits(logits_B, labels_B, reduction="none")
    return _ratio(weights_B @ loss_B, weights_B.sum())


def ne(scores_B: Tensor, labels_B: Tensor, weights_B: Tensor | None = None, *, base_rate: float | None = None) -> float:
    """Returns the normalised entropy: the logloss divided by that of always predicting the base rate. Lower is better.

    It is NaN when the base rate is 0 or 1. Source: He et al. 2014, Practical lessons from predicting clicks on ads at
    Facebook, section 2.

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
    """Returns predicted clicks divided by clicks, sum_b w_b p_b / sum_b w_b y_b; 1 is best, NaN without clicks.

    Arguments and errors are those of `logloss`. Source: He et al. 2014, section 2.
    """
    scores_B, labels_B, weights_B = columns(scores_B, labels_B, weights_B)
    check_probabilities(scores_B)
    return _ratio(weights_B @ scores_B, weights_B @ labels_B)


def base_logloss(mass: float, clicks: float, base_rate: float | None = None) -> float:
    """Returns the mean logloss of always predicting the base rate; NaN when that is 0 or 1.

    Args:
        mass: the sum of the weights, > 0.
        clicks: the sum of the weights of rows with a click.
        base_rate: by default clicks / mass; then the result is the entropy of that rate.
    """
    own = clicks / mass
    rate = own if base_rate is None else base_rate
    return -(own * math.log(rate) + (1 - own) * math.log1p(-rate)) if 0 < rate < 1 else math.nan


def _ratio(above: Tensor, below: Tensor) -> float:
    return float(above) / float(below) if below else math.nan
