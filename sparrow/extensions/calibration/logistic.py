from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparrow import data
from sparrow.core.progress import Progress
from sparrow.extensions.calibration import fit
from sparrow.trained.calibrators import Calibrator
from sparrow.trained.parts import Scores

STEPS = 50
CLOSE = 1e-10
EDGE = 1e-7  # of probabilities whose log-odds are taken


@dataclass(frozen=True, kw_only=True)
class Config:
    """The log-odds of a score, times a slope, plus an intercept (Platt, 1999)."""

    slope: float = 1.0
    intercept: float = 0.0

    def __call__(self, scores_B: Tensor) -> Tensor:
        """Returns probabilities [B] of scores [B]."""
        return torch.sigmoid(self.slope * _log_odds(scores_B) + self.intercept)

    @classmethod
    def check_valid(cls, dataset: data.Dataset) -> None:
        """Check that calibrators can be fitted to a prepared log."""
        fit.check_valid(dataset)

    @classmethod
    def fit_to_valid(
        cls, scorer: Scores, dataset: data.Dataset, progress: Progress
    ) -> tuple[Calibrator, ...]:
        """Returns a calibrator for each label, fitted to the valid part of a log."""
        return fit.fit_to_valid("logistic", scorer, dataset, progress)


def fit_config(scores_B: Tensor, labels_B: Tensor, weights_B: Tensor) -> Config:
    """Returns the calibrator with the greatest likelihood of smoothed labels, of those whose slope
    is not negative. All float64.

    Labels are smoothed as Platt does (1999, section 2.2), so that labels which scores tell apart
    have one too. Where scores fall as labels rise, the slope is 0 and the intercept is that of the
    rate.
    """
    clicks = float(weights_B @ labels_B)
    negatives = float(weights_B @ (1 - labels_B))
    targets_B = labels_B * (clicks + 1) / (clicks + 2) + (1 - labels_B) / (negatives + 2)
    slope, intercept = _fit(
        torch.stack([_log_odds(scores_B), torch.ones_like(scores_B)], 1), targets_B, weights_B
    )
    if slope >= 0:
        return Config(slope=slope, intercept=intercept)
    return Config(slope=0.0, intercept=float(torch.logit(weights_B @ targets_B / weights_B.sum())))


def _fit(x_B2: Tensor, labels_B: Tensor, weights_B: Tensor) -> list[float]:
    """Returns slope and intercept by Newton's method, whose steps are halved where they go too
    far.
    """
    fit_2 = torch.tensor([1.0, 0.0], dtype=torch.float64)
    loss = _loss(x_B2, fit_2, labels_B, weights_B)
    for _ in range(STEPS):
        p_B = torch.sigmoid(x_B2 @ fit_2)
        gradient_2 = x_B2.T @ (weights_B * (p_B - labels_B))
        curvature_22 = x_B2.T @ (x_B2 * (weights_B * p_B * (1 - p_B))[:, None])
        step_2 = torch.linalg.lstsq(curvature_22, gradient_2[:, None]).solution[:, 0]
        size = 1.0
        most = loss * (1 + CLOSE)  # by no more than rounding
        while _loss(x_B2, fit_2 - size * step_2, labels_B, weights_B) > most and size > CLOSE:
            size /= 2  # a whole step may go too far where scores are far from the labels
        fit_2 = fit_2 - size * step_2
        loss = _loss(x_B2, fit_2, labels_B, weights_B)
        if float(step_2.abs().max()) < CLOSE:
            break
    return fit_2.tolist()


def _loss(x_B2: Tensor, line_2: Tensor, labels_B: Tensor, weights_B: Tensor) -> float:
    z_B = x_B2 @ line_2
    return float(
        weights_B
        @ torch.nn.functional.binary_cross_entropy_with_logits(z_B, labels_B, reduction="none")
    )


def _log_odds(scores_B: Tensor) -> Tensor:
    return torch.logit(scores_B, EDGE)
