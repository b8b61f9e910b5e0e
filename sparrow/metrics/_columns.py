"""The checks of what every metric is given."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparrow.core import UserError

PIECE = 1 << 18  # rows that are judged at a time


class ColumnBuffer:
    """A column of all rows, in blocks of many batches each. Nothing of a batch is kept but copies
    in these.

    What else stayed would lie between what batches free, so that its memory could not be used again
    for larger ones.
    """

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []
        self._filled = 0  # rows of the last block

    def __bool__(self) -> bool:
        return bool(self._blocks)

    def add(self, part: Tensor) -> None:
        """Keep the column of some rows, [B] or [B, T]."""
        if not self._blocks:
            self._begin(part)
        while len(part):
            if self._filled == PIECE:
                self._begin(part)
            end = min(self._filled + len(part), PIECE)
            count = end - self._filled
            self._blocks[-1][self._filled : end] = part[:count]
            self._filled, part = end, part[count:]

    def _begin(self, part: Tensor) -> None:
        self._blocks.append(part.new_empty((PIECE, *part.shape[1:])))
        self._filled = 0

    def take(self) -> Tensor:
        """Returns the column of all rows, and keeps it no more."""
        *full_blocks, last = self._blocks
        self._blocks = []
        return torch.cat([*full_blocks, last[: self._filled]])


def columns(
    scores_B: Tensor, labels_B: Tensor, weights_B: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns scores, labels and weights as float64 [B] on the scores' device, without their graph.

    Args:
        scores_B: [B].
        labels_B: 0..1, [B].
        weights_B: >= 0, [B]; ones by default.

    Raises:
        UserError: for other shapes, labels outside 0..1 (or missing) and weights that are negative
            or not finite.
    """
    parts = {"scores": scores_B, "labels": labels_B, "weights": weights_B}
    for name, part in parts.items():
        if part is not None and part.shape != (scores_B.numel(),):
            raise UserError(
                f"{name}: shape {tuple(part.shape)}; scores, labels and weights are one value per"
                " row, [B]"
            )
    if weights_B is None:
        weights_B = torch.ones_like(scores_B, dtype=torch.float64)
    scores_B, labels_B, weights_B = (
        part.detach().to(scores_B.device, torch.float64) for part in (scores_B, labels_B, weights_B)
    )
    _check("labels", labels_B, 1.0, "lie in 0..1; leave out rows without a label")
    _check(
        "weights",
        weights_B,
        torch.finfo(torch.float64).max,
        "are finite and not negative; mend the weight column",
    )
    return scores_B, labels_B, weights_B


def labelled(labels_B: Tensor, *parts: Tensor | None) -> list[Any]:
    """Returns the labels of the rows that have one, and what else is known of these rows.

    Args:
        labels_B: [B], NaN where one is missing.
        parts: scores, weights, groups, [B] each or None; or several numbers of each row, [B, M].
    """
    has_label_B = ~labels_B.isnan()
    if bool(has_label_B.all()):
        return [labels_B, *parts]
    rows = [None if part is None else part[has_label_B.to(part.device)] for part in parts]
    return [labels_B[has_label_B], *rows]


def has_shares(labels_B: Tensor) -> bool:
    """Returns whether a label lies between 0 and 1, as that of a row does which stands for
    several.
    """
    return bool(((labels_B > 0) & (labels_B < 1)).any())


def check_probabilities(scores_B: Tensor) -> None:
    """Raise UserError when a score lies outside 0..1. NaN passes, and makes the figures NaN."""
    remedy = "are probabilities in 0..1; apply a sigmoid, or use logloss_from_logits"
    _check("scores", scores_B.nan_to_num(0.0, torch.inf, -torch.inf), 1.0, remedy)


def _check(name: str, values_B: Tensor, high: float, remedy: str) -> None:
    bad_B = ~((values_B >= 0) & (values_B <= high))
    if bool(bad_B.any()):
        row = int(bad_B.nonzero()[0])
        raise UserError(f"{name}: {float(values_B[row]):g} in row {row}; {name} {remedy}")
