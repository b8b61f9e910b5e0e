from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sparrow import data
from sparrow.core.errors import UserError
from sparrow.core.progress import Progress
from sparrow.extensions.calibration import fit
from sparrow.trained.calibrators import Calibrator
from sparrow.trained.parts import Scores


@dataclass(frozen=True, kw_only=True)
class Config:
    """The rising steps that are nearest to the labels, with straight lines between them (Zadrozny
    and Elkan, 2002).

    scores, probabilities: of the points, both rising.
    """

    scores: tuple[float, ...] = (0.0, 1.0)
    probabilities: tuple[float, ...] = (0.0, 1.0)

    def __post_init__(self) -> None:
        if not 0 < len(self.scores) == len(self.probabilities):
            raise UserError("scores, probabilities: of other lengths; fit the calibrator again")
        for name in ("scores", "probabilities"):
            points = list(getattr(self, name))
            if points != sorted(points) or (name == "scores" and len(set(points)) < len(points)):
                raise UserError(f"{name}: do not rise; fit the calibrator again")

    def __call__(self, scores_B: Tensor) -> Tensor:
        """Returns probabilities [B] of scores [B]."""
        scores_P = torch.tensor(self.scores, dtype=torch.float64)
        probabilities_P = torch.tensor(self.probabilities, dtype=torch.float64)
        # of each line
        along_BP = ((scores_B.double()[:, None] - scores_P[:-1]) / scores_P.diff()).clamp(0.0, 1.0)
        return (probabilities_P[0] + (along_BP * probabilities_P.diff()).sum(1)).to(scores_B.dtype)

    @classmethod
    def check_valid(cls, dataset: data.Dataset) -> None:
        """Check that calibrators can be fitted to a prepared log."""
        fit.check_valid(dataset)

    @classmethod
    def fit_to_valid(
        cls, scorer: Scores, dataset: data.Dataset, progress: Progress
    ) -> tuple[Calibrator, ...]:
        """Returns a calibrator for each label, fitted to the valid part of a log."""
        return fit.fit_to_valid("isotonic", scorer, dataset, progress)


def fit_config(scores_B: Tensor, labels_B: Tensor, weights_B: Tensor) -> Config:
    """Returns the calibrator with the least squares, by pooling neighbours that fall. All float64.

    No probability is 0 or 1. Only the first step can have no click, and only the last one nothing
    else; of such rows half a one counts as the other kind, but no further than to the next step.
    """
    scores, at_B = np.unique(scores_B.numpy(), return_inverse=True)
    mass = np.bincount(at_B, weights_B.numpy())
    clicks = np.bincount(at_B, (weights_B * labels_B).numpy())
    blocks: list[list[float]] = []  # mass, clicks, mass x score, of neighbours
    for group in zip(mass, clicks, mass * scores, strict=True):
        if not group[0]:
            continue
        blocks.append(list(group))
        while len(blocks) > 1 and blocks[-2][1] * blocks[-1][0] >= blocks[-1][1] * blocks[-2][0]:
            last = blocks.pop()
            blocks[-1] = [a + b for a, b in zip(blocks[-1], last, strict=True)]
    size, block_clicks, block_scores = np.array(blocks).T
    probabilities = block_clicks / size
    edge = np.minimum(0.5 / size, 0.5)
    if probabilities[0] == 0:
        probabilities[0] = min(edge[0], probabilities[1])
    if probabilities[-1] == 1:
        probabilities[-1] = max(1 - edge[-1], probabilities[-2])
    probabilities = np.maximum.accumulate(probabilities)  # a last bit may fall
    return Config(
        scores=tuple((block_scores / size).tolist()), probabilities=tuple(probabilities.tolist())
    )
