"""The checks of what every metric is given."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparrow.core import UserError


def columns(scores_B: Tensor, labels_B: Tensor, weights_B: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Returns scores, labels and weights as float64 [B] on the scores' device, without their graph.

    Args:
        scores_B: [B].
        labels_B: 0..1, [B].
        weights_B: >= 0, [B]; ones by default.

    Raises:
        UserError: for other shapes, labels outside 0..1 (or missing) and weights that are negative or not finite.
    """
    parts = {"scores": scores_B, "labels": labels_B, "weights": weights_B}
    for name, part in parts.items():
        if part is not None and part.shape != (scores_B.numel(),):
            raise UserError(f"{name}: shape {tuple(part.shape)}; scores, labels and weights are one value per row, [B]")
    if weights_B is None:
        weights_B = torch.ones_like(scores_B, dtype=torch.float64)
    scores_B, labels_B, weights_B = (
        part.detach().to(scores_B.device, torch.float64) for part in (scores_B, labels_B, weights_B)
    )
    _check("labels", labels_B, 1.0, "are 0 and 1; leave out rows without a label")
    _check("weights", weights_B, torch.finfo(torch.float64).max, "are finite and not negative; mend the weight column")
    return scores_B, labels_B, weights_B


def labelled(labels_B: Tensor, *others: Tensor | None) -> list[Any]:
    """Returns the labels of the rows that have one, and what else is known of these rows.

    Args:
        labels_B: [B], NaN where one is missing.
        others: scores, weights, groups, [B] each or None.
    """
    kept_B = ~labels_B.isnan()
    if bool(kept_B.all()):
        return [labels_B, *others]
    return [labels_B[kept_B], *(None if other is None else other[kept_B.to(other.device)] for other in others)]


def check_probabilities(scores_B: Tensor) -> None:
    """Raise UserError when a score lies outside 0..1. NaN passes, and makes the figures NaN."""
    remedy = "are probabilities in 0..1; apply a sigmoid, or use logloss_from_logits"
    _check("scores", scores_B.nan_to_num(0.0, torch.inf, -torch.inf), 1.0, remedy)


def _check(name: str, values_B: Tensor, high: float, remedy: str) -> None:
    bad_B = ~((values_B >= 0) & (values_B <= high))
    if bool(bad_B.any()):
        row = int(bad_B.nonzero()[0])
        raise UserError(f"{name}: {float(values_B[row]):g} in row {row}; {name} {remedy}")
