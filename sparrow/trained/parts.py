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

    def scores(self, batch: Batch) -> torch.Tensor:
        """Returns probabilities [B, T]."""
        ...


def some_batches(dataset: data.Dataset) -> Iterator[Batch]:
    """Yields batches of all parts, in the order of time; of MOST rows of each, about."""
    for split in ("train", "valid", "test"):
        done = 0
        for batch in dataset.loader(8192, split=split, dedup="off"):
            yield batch
            done += batch.batch_size
            if done >= MOST:
                break


def scored(found: Scores, dataset: data.Dataset, split: str, told: Progress) -> tuple[Any, ...]:
    """Returns scores [N, T] and labels [N, T] of a part, and its weights [N] and sessions [N] or None."""
    kept = [
        (scores_BT, batch.labels_BT, batch.weights_B, batch.session_B)
        for scores_BT, batch in scored_batches(found, dataset, split, told)
    ]
    return tuple(None if of[0] is None else torch.cat(of) for of in zip(*kept, strict=True))


def scored_batches(
    found: Scores, dataset: data.Dataset, split: str, told: Progress
) -> Iterator[tuple[torch.Tensor, Batch]]:
    """Yields scores of batches of a part, and the batches; of MOST rows, about."""
    loader, done = dataset.loader(8192, split=split, dedup="off"), 0
    total = min(dataset.rows(split), MOST)
    for batch in loader:
        yield found.scores(batch), batch
        done += batch.batch_size
        told(f"{split} rows scored", min(done, total), total)
        if done >= MOST:
            return
