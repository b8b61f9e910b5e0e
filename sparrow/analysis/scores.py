"""A part of a prepared log with a model's scores: what a report and a comparison look at."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparrow.core.errors import UserError, suggest
from sparrow.core.progress import Progress
from sparrow.data.batches.dataset import Dataset
from sparrow.features.schema import Schema
from sparrow.metrics import labelled
from sparrow.metrics.intervals import Estimate, estimates
from sparrow.trained.scorer import Restored


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """The judged label [N] of a part's rows in the log's order, with weights and sessions [N] where the log has them.

    A label that is missing is NaN.

    scores_N: click probabilities, [N].
    """

    scores_N: Tensor
    labels_N: Tensor
    weights_N: Tensor | None
    sessions_N: Tensor | None

    def estimates(self, rows_N: Tensor | None = None) -> dict[str, Estimate]:
        """Returns metrics with what each session, or else each row, adds to their error.

        rows_N: a mask [N] of the rows to judge; by default all. Of them those count that have the label.
        """
        parts = (self.scores_N, self.labels_N, self.weights_N, self.sessions_N)
        scores, labels, weights, sessions = (part if part is None or rows_N is None else part[rows_N] for part in parts)
        assert labels is not None
        labels, scores, weights, sessions = labelled(labels, scores, weights, sessions)
        return estimates(scores, labels, weights, sessions)

    def known(self) -> Rows:
        """Returns the rows that have the label."""
        labels, scores, weights, sessions = labelled(self.labels_N, self.scores_N, self.weights_N, self.sessions_N)
        return Rows(scores_N=scores, labels_N=labels, weights_N=weights, sessions_N=sessions)

    def by(self, scores_N: Tensor) -> Rows:
        """Returns the same rows with other scores. scores_N: click probabilities, [N]."""
        return Rows(scores_N=scores_N, labels_N=self.labels_N, weights_N=self.weights_N, sessions_N=self.sessions_N)


def label_number(schema: Schema, name: str | None) -> int:
    """Returns the number of the label with this name, by default of the first one.

    Raises:
        UserError: when no label has this name.
    """
    if name is not None and name not in schema.labels:
        raise UserError(f"--label: {name!r} is not a label of the log{suggest(name, schema.labels)}")
    return schema.labels.index(name) if name is not None else 0


def score_part(found: Restored, dataset: Dataset, split: str, told: Progress, label: int = 0) -> Rows:
    """Returns the rows of a part with their scores. It needs 12 to 24 bytes of memory a row.

    Args:
        found: the model.
        dataset: the prepared log.
        split: the part.
        told: is told how far it is.
        label: the number of the label that is judged.

    Raises:
        UserError: when the part has no rows.
    """
    if not dataset.rows(split):
        raise UserError(
            f"{dataset.path}: its {split} part is empty; choose another --split, or prepare with a larger share"
        )
    kept, done = [], 0
    for batch in dataset.loader(found.run.data.batch_size, split=split, dedup=found.run.data.dedup):
        assert batch.labels_BT is not None
        kept.append((found.scores(batch, done)[:, label], batch.labels_BT[:, label], batch.weights_B, batch.session_B))
        done += batch.batch_size
        told(f"scored {split}", done, dataset.rows(split))
    scores, labels, weights, sessions = zip(*kept, strict=True)
    return Rows(
        scores_N=torch.cat(scores), labels_N=torch.cat(labels), weights_N=_joined(weights), sessions_N=_joined(sessions)
    )


def _joined(parts: tuple[Tensor | None, ...]) -> Tensor | None:
    present = [part for part in parts if part is not None]
    return torch.cat(present) if present else None
