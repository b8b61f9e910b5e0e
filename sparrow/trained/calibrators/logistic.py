from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

STEPS, CLOSE = 50, 1e-10
EDGE = 1e-7  # of probabilities whose log-odds are taken


@dataclass(frozen=True, kw_only=True)
class Config:
    """The log-odds of a score, times a slope, plus an intercept (Platt, 1999)."""

    slope: float = 1.0
    intercept: float = 0.0

    def __call__(self, scores_B: Tensor) -> Tensor:
        """See `Calibrator`."""
        return torch.sigmoid(self.slope * _log_odds(scores_B) + self.intercept)


def fitted(scores_B: Tensor, labels_B: Tensor, weights_B: Tensor) -> Config:
    """Returns that with the greatest likelihood, by Newton's method. All float64."""
    x_B2 = torch.stack([_log_odds(scores_B), torch.ones_like(scores_B)], 1)
    found_2 = torch.tensor([1.0, 0.0], dtype=torch.float64)
    loss = _loss(x_B2, found_2, labels_B, weights_B)
    for _ in range(STEPS):
        p_B = torch.sigmoid(x_B2 @ found_2)
        slope_2 = x_B2.T @ (weights_B * (p_B - labels_B))
        curve_22 = x_B2.T @ (x_B2 * (weights_B * p_B * (1 - p_B))[:, None])
        step_2 = torch.linalg.lstsq(curve_22, slope_2[:, None]).solution[:, 0]
        size = 1.0
        most = loss * (1 + CLOSE)  # by no more than rounding
        while _loss(x_B2, found_2 - size * step_2, labels_B, weights_B) > most and size > CLOSE:
            size /= 2  # a whole step may go too far where scores are far from the labels
        found_2 = found_2 - size * step_2
        loss = _loss(x_B2, found_2, labels_B, weights_B)
        if float(step_2.abs().max()) < CLOSE:
            break
    return Config(slope=max(float(found_2[0]), 0.0), intercept=float(found_2[1]))


def _loss(x_B2: Tensor, of_2: Tensor, labels_B: Tensor, weights_B: Tensor) -> float:
    z_B = x_B2 @ of_2
    return float(weights_B @ torch.nn.functional.binary_cross_entropy_with_logits(z_B, labels_B, reduction="none"))


def _log_odds(scores_B: Tensor) -> Tensor:
    return torch.logit(scores_B, EDGE)
