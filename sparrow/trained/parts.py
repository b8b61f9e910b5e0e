"""Parts of a prepared log, scored by a model of a run or of a model folder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch

from sparrow import data
from sparrow.core import Batch
from sparrow.core.progress import Progress
from sparrow.features.schema import Schema
from sparrow.trained.calibrators import Calibrator

MOST = 1_000_000  # rows of a part that are read


class Scores(Protocol):
    """A model that scores: that of a run, or of a folder."""

    @property
    def schema(self) -> Schema:
        """What the columns mean."""
        ...

    @property
    def name(self) -> str:
        """The model's name in a run file."""
        ...

    @property
    def step(self) -> int:
        """The step of training that it is of."""
        ...

    @property
    def calibrators(self) -> Sequence[Calibrator]:
        """What its scores pass through."""
        ...

    @property
    def mixing(self) -> str:
        """Why a row's score depends on the rows that it is scored with, in words; "" if it does
        not.
        """
        ...

    def scores(self, batch: Batch) -> torch.Tensor:
        """Returns probabilities [B, T]."""
        ...


def sample_batches(dataset: data.Dataset) -> Iterator[Batch]:
    """Yields batches of all parts, in the order of time; of MOST rows of each, about."""
    for split in ("train", "valid", "test"):
        rows_read = 0
        for batch in dataset.loader(8192, split=split, dedup="off"):
            yield batch
            rows_read += batch.batch_size
            if rows_read >= MOST:
                break


def score_split(
    model: Scores, dataset: data.Dataset, split: str, progress: Progress
) -> tuple[Any, ...]:
    """Returns scores [N, T] and labels [N, T] of a part, and its weights [N] and sessions [N] or
    None.
    """
    rows = [
        (scores_BT, batch.labels_BT, batch.weights_B, batch.session_B)
        for scores_BT, batch in score_batches(model, dataset, split, progress)
    ]
    columns = zip(*rows, strict=True)
    return tuple(None if column[0] is None else torch.cat(column) for column in columns)


def score_batches(
    model: Scores, dataset: data.Dataset, split: str, progress: Progress
) -> Iterator[tuple[torch.Tensor, Batch]]:
    """Yields scores of batches of a part, and the batches; of MOST rows, about."""
    rows_scored = 0
    total = min(dataset.rows(split), MOST)
    for batch in dataset.loader(8192, split=split, dedup="off"):
        yield model.scores(batch), batch
        rows_scored += batch.batch_size
        progress(f"{split} rows scored", min(rows_scored, total), total)
        if rows_scored >= MOST:
            return
