"""The same rows of a log, scored again and again by models that are to be compared."""

from __future__ import annotations

import itertools
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

    def ne(self, found: Restored) -> Estimate:
        """Returns the normalised entropy of a model's scores, for the first label.

        Raises:
            UserError: when the labels are all alike.
        """
        return self._estimates(found.scores, found.run.data.batch_size)[0]

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
        """Returns what `ne_of` does. scores: of a batch and the number of its first row. size: rows of a batch."""
        batch = self.batch
        spans = [(low, min(low + size, batch.batch_size)) for low in range(0, batch.batch_size, size)]
        scores_NT = torch.cat([scores(batch.part(low, high), low) for low, high in spans])
        assert batch.labels_BT is not None
        found = []
        for scores_N, labels_N in zip(scores_NT.T, batch.labels_BT.T, strict=True):
            rows = Rows(scores_N=scores_N, labels_N=labels_N, weights_N=batch.weights_B, sessions_N=batch.session_B)
            found.append(rows.estimates()["ne"])
            if math.isnan(found[-1].value):
                raise UserError(
                    f"{self.place}: the labels of its valid part are all alike, so NE is not defined; prepare a larger "
                    "one"
                )
        return found


def judges(dataset: Dataset, rows: int, parts: int = 2) -> list[Judge]:
    """Returns judges with different rows of the valid part, drawn at random: to choose by, and to check a choice.

    Args:
        dataset: the prepared log.
        rows: of each, where there are so many.
        parts: how many judges.

    Raises:
        UserError: when there is no valid part.
    """
    there = dataset.rows("valid")
    if there < parts:
        raise UserError(
            f"{dataset.path}: its valid part is empty, and damage is measured there; prepare with --valid 0.1"
        )
    count = min(parts * rows, there)
    whole = next(iter(dataset.loader(count, split="valid", shuffle=True)))
    edges = [count * part // parts for part in range(parts + 1)]
    return [Judge(whole.part(low, high), dataset.path) for low, high in itertools.pairwise(edges)]
