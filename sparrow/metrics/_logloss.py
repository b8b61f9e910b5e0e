"""The logloss of each row, of clamped scores, and that of a constant."""

from __future__ import annotations

import math

from torch import Tensor

CLAMP = 1e-7
"""Scores are moved into [CLAMP, 1 - CLAMP] before a logarithm, so that one row costs at most 16.1
nats.

It is about the distance from 1 to the next smaller float32. A sigmoid that rounds to 1.0 must not
cost infinity.
"""


def log_odds_and_loss(scores_B: Tensor, labels_B: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the logit and the logloss in nats of each clamped float64 score [B]."""
    p_B = scores_B.clamp(CLAMP, 1 - CLAMP)
    log_p_B, log_q_B = p_B.log(), (-p_B).log1p()
    return log_p_B - log_q_B, -(labels_B * log_p_B + (1 - labels_B) * log_q_B)


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
