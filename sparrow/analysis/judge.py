"""The same rows of a log, scored again and again by models that are to be compared."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from sparrow.analysis.scores import Rows
from sparrow.core import Batch, UserError
from sparrow.data.batches.dataset import Dataset
from sparrow.metrics.intervals import Estimate
from sparrow.trained.scorer import Restored

BATCH = 1024  # rows that are scored at a time


class Judge:
    """Scores the same rows again and again.

    Args:
        batch: the rows, with labels.
        place: of the log, for errors.
    """

    def __init__(self, batch: Batch, place: Path) -> None:
        self.batch = batch
        self.place = place

    def ne(self, restored: Restored) -> Estimate:
        """Returns the normalised entropy of a model's scores, for the first label.

        Raises:
            UserError: when the labels are all alike.
        """
        return self._estimates(restored.scores, restored.run.data.batch_size)[0]

    def ne_of(self, scores: Callable[[Batch], Tensor]) -> list[Estimate]:
        """Returns the normalised entropy of scores, for each label.

        Two of them that are subtracted are a paired difference (see `Estimate`).

        Args:
            scores: gives the probabilities [B, T] of a batch.

        Raises:
            UserError: when the labels are all alike.
        """
        return self._estimates(lambda batch, row: scores(batch), BATCH)

    def _estimates(self, scores: Callable[[Batch, int], Tensor], size: int) -> list[Estimate]:
        """Returns the normalised entropy for each label. scores: of a batch and the number of its
        first row. size: rows of a batch.
        """
        batch = self.batch
        parts = []
        for low in range(0, batch.batch_size, size):
            high = min(low + size, batch.batch_size)
            parts.append(scores(batch.part(low, high), low))
        scores_NT = torch.cat(parts)
        assert batch.labels_BT is not None
        estimates = []
        for scores_N, labels_N in zip(scores_NT.T, batch.labels_BT.T, strict=True):
            rows = Rows(
                scores_N=scores_N,
                labels_N=labels_N,
                weights_N=batch.weights_B,
                sessions_N=batch.session_B,
            )
            estimate = rows.estimates()["ne"]
            if math.isnan(estimate.value):
                raise UserError(
                    f"{self.place}: the labels of its valid part are all alike, so NE is not"
                    " defined; prepare a larger one"
                )
            estimates.append(estimate)
        return estimates


def judges(dataset: Dataset, rows: int) -> tuple[Judge, Judge]:
    """Returns two judges with different rows of the valid part, drawn at random: to choose by, and
    to check a choice.

    What is chosen by some rows is better on these than on others, so others say how good it is.

    Args:
        dataset: the prepared log.
        rows: of each. Where there are fewer, each has a half.

    Raises:
        UserError: when there is no valid part.
    """
    available = dataset.rows("valid")
    if available < 2:
        raise UserError(
            f"{dataset.path}: its valid part is empty, and damage is measured there; prepare with"
            " --valid 0.1"
        )
    count = min(2 * rows, available)
    batch = next(iter(dataset.loader(count, split="valid", shuffle=True)))
    return halves(batch, dataset.path)


def halves(batch: Batch, place: Path) -> tuple[Judge, Judge]:
    """Returns judges with the first and with the last half of some rows. place: of the log, for
    errors.
    """
    half = batch.batch_size // 2
    return Judge(batch.part(0, half), place), Judge(batch.part(half, batch.batch_size), place)
