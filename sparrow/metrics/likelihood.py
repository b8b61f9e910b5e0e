"""Logloss and what is made of it: normalised entropy, calibration."""

from __future__ import annotations

import math

from torch import Tensor
from torch.nn import functional as F

from sparrow.metrics._columns import check_probabilities, columns

CLAMP = 1e-7
"""Scores are moved into [CLAMP, 1 - CLAMP] before a logarithm, so that one row costs at most 16.1 nats.

It is about the distance from 1 to the float32 below it: a sigmoid that rounds to 1.0 must not cost infinity.
"""


def log_odds_and_loss(scores_B: Tensor, labels_B: Tensor) -> tuple[Tensor, Tensor]:
    """Logit and logloss in nats of each clamped float64 score [B]."""
    p_B = scores_B.clamp(CLAMP, 1 - CLAMP)
    log_p_B, log_q_B = p_B.log(), (-p_B).log1p()
    return log_p_B - log_q_B, -(labels_B * log_p_B + (1 - labels_B) * log_q_B)


def logloss(scores_B: Tensor, labels_B: Tensor, weights_B: Tensor | None = None) -> float:
    """Mean logloss in nats, sum_b w_b l_b / sum_b w_b, of probabilities [B] moved into [CLAMP, 1 - CLAMP].

    labels_B: 0 or 1. weights_B: >= 0, ones unless given. NaN without rows. Raises UserError for scores outside 0..1.
    """
    scores_B, labels_B, weights_B = columns(scores_B, labels_B, weights_B)
    check_probabilities(scores_B)
    return _ratio(weights_B @ log_odds_and_loss(scores_B, labels_B)[1], weights_B.sum())


def logloss_from_logits(logits_B: Tensor, labels_B: Tensor, weights_B: Tensor | None = None) -> float:
    """Mean logloss in nats of logits [B], exact at any size: nothing is clamped. Else like `logloss`."""
    logits_B, labels_B, weights_B = columns(logits_B, labels_B, weights_B)
    loss_B = F.binary_cross_entropy_with_logits(logits_B, labels_B, reduction="none")
    return _ratio(weights_B @ loss_B, weights_B.sum())


def ne(scores_B: Tensor, labels_B: Tensor, weights_B: Tensor | None = None, *, base_rate: float | None = None) -> float:
    """Normalised entropy: logloss over that of always predicting the base rate; below 1 is better than that.

    base_rate: the rows' own (weighted) mean label unless given. NaN when it is 0 or 1. Else like `logloss`.
    Source: He et al. 2014, Practical lessons from predicting clicks on ads at Facebook, section 2.
    """
    loss = logloss(scores_B, labels_B, weights_B)
    _, labels_B, weights_B = columns(scores_B, labels_B, weights_B)
    mass, clicks = float(weights_B.sum()), float(weights_B @ labels_B)
    return loss / base_logloss(mass, clicks, base_rate) if mass else math.nan


def calibration(scores_B: Tensor, labels_B: Tensor, weights_B: Tensor | None = None) -> float:
    """Predicted clicks over clicks, sum_b w_b p_b / sum_b w_b y_b; 1 is right, NaN without clicks.

    Source: He et al. 2014, section 2.
    """
    scores_B, labels_B, weights_B = columns(scores_B, labels_B, weights_B)
    check_probabilities(scores_B)
    return _ratio(weights_B @ scores_B, weights_B @ labels_B)


def base_logloss(mass: float, clicks: float, base_rate: float | None = None) -> float:
    """Mean logloss of always predicting base_rate (clicks / mass unless given) on rows of `mass` > 0 with `clicks`.

    With the rows' own rate it is that rate's entropy. NaN when the prediction is 0 or 1.
    """
    own = clicks / mass
    rate = own if base_rate is None else base_rate
    return -(own * math.log(rate) + (1 - own) * math.log1p(-rate)) if 0 < rate < 1 else math.nan


def _ratio(above: Tensor, below: Tensor) -> float:
    return float(above) / float(below) if below else math.nan
