"""Probabilities that are right on average: what a trained model's scores pass through last.

A kind has a dataclass `Config` with what was fitted; see the extension `calibration`. No kind turns
the order of two scores. `trained/calibrator_files.py` reads and writes them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol, cast

import torch
from torch import Tensor

from sparrow.core import Batch
from sparrow.core.config import Family

FILE = "calibrator.toml"  # of a model folder
FOLDER = "calibrators"  # of a run directory
FAMILY = Family("sparrow.trained.calibrators")
KINDS = Literal["none", "logistic", "isotonic"]  # its members, and none of them
Scores = Callable[[Batch], Tensor]


class Calibrator(Protocol):
    """What a kind's `Config` offers."""

    def __call__(self, scores_B: Tensor) -> Tensor:
        """Returns probabilities [B] of the log on which it was fitted."""
        ...


def passed(scores_BT: Tensor, calibrators: Sequence[Calibrator]) -> Tensor:
    """Returns scores [B, T] as they are after calibrators, one for each label; as they were where
    there are none.
    """
    if not calibrators:
        return scores_BT
    columns = zip(calibrators, scores_BT.T, strict=True)
    return torch.stack([calibrator(scores_B) for calibrator, scores_B in columns], 1)


def calibrated(score: Scores, calibrators: Sequence[Calibrator]) -> Scores:
    """Returns a function that scores a batch, [B, T], through calibrators."""
    return (lambda batch: passed(score(batch), calibrators)) if calibrators else score


def kind_of(calibrators: Sequence[Calibrator]) -> KINDS:
    """Returns of what kind they are."""
    return cast(KINDS, FAMILY.name_of(calibrators[0]) if calibrators else "none")
