"""A part of a prepared log with a model's scores: what a report and a comparison look at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from sparrow.core.errors import UserError, suggest
from sparrow.core.progress import Progress
from sparrow.data.batches.dataset import Dataset
from sparrow.features.encodings import FIRST
from sparrow.features.schema import Schema
from sparrow.metrics import ColumnBuffer
from sparrow.metrics.intervals import Estimate, estimates
from sparrow.trained.scorer import Restored


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """The judged label [N] of a part's rows in the log's order, with weights and sessions [N] where
    the log has them.

    A label that is missing is NaN.

    scores_N: click probabilities, [N]. units_N: what is independent of each other, where it is not
    sessions, else rows. measures: name -> what the model measures of each row, [N]; see
    `BringsMeasures`.
    """

    scores_N: Tensor
    labels_N: Tensor
    weights_N: Tensor | None
    sessions_N: Tensor | None
    units_N: Tensor | None = None
    measures: Mapping[str, Tensor] = field(default_factory=dict)

    def estimates(self, rows_N: Tensor | None = None) -> dict[str, Estimate]:
        """Returns metrics with what each session, or else each row, adds to their error.

        rows_N: a mask [N] of the rows to judge; by default all. Of them those count that have the
        label.
        """
        rows = self if rows_N is None else self._part(rows_N)
        known = rows.known()
        return estimates(
            known.scores_N,
            known.labels_N,
            known.weights_N,
            known.sessions_N,
            known.units_N,
            known.measures,
        )

    def known(self) -> Rows:
        """Returns the rows that have the label."""
        known_N = ~self.labels_N.isnan()
        return self if bool(known_N.all()) else self._part(known_N)

    def by(self, scores_N: Tensor) -> Rows:
        """Returns the same rows with the scores of another. scores_N: click probabilities, [N]."""
        return replace(self, scores_N=scores_N, measures={})

    def _part(self, rows_N: Tensor) -> Rows:
        measures = {name: measure_N[rows_N] for name, measure_N in self.measures.items()}
        parts = {name: part[rows_N] for name, part in vars(self).items() if torch.is_tensor(part)}
        return replace(self, **parts, measures=measures)


def label_number(schema: Schema, name: str | None) -> int:
    """Returns the number of the label with this name, by default of the first one.

    Raises:
        UserError: when no label has this name.
    """
    if name is not None and name not in schema.labels:
        raise UserError(
            f"--label: {name!r} is not a label of the log{suggest(name, schema.labels)}"
        )
    return schema.labels.index(name) if name is not None else 0


def score_part(
    restored: Restored, dataset: Dataset, split: str, progress: Progress, label: int = 0
) -> Rows:
    """Returns the rows of a part with their scores. It needs 12 to 24 bytes of memory a row, and
    those of what the model measures.

    Args:
        restored: the model.
        dataset: the prepared log.
        split: the part.
        progress: is told how far it is.
        label: the number of the label that is judged.

    Raises:
        UserError: when the part has no rows.
    """
    if not dataset.rows(split):
        raise UserError(
            f"{dataset.path}: its {split} part is empty; choose another --split, or prepare with a"
            " larger share"
        )
    model = restored.model
    columns = [ColumnBuffer() for _ in range(5)]
    first = 0
    settings = restored.run.data
    for batch in dataset.loader(settings.batch_size, split=split, dedup=settings.dedup):
        assert batch.labels_BT is not None
        parts = (
            restored.scores(batch, first)[:, label],
            batch.labels_BT[:, label],
            batch.weights_B,
            batch.session_B,
            model.measure().cpu() if model.measures else None,
        )
        for column, part in zip(columns, parts, strict=True):
            if part is not None:
                column.add(part)
        first += batch.batch_size
        progress(f"scored {split}", first, dataset.rows(split))
    scores_N, labels_N, weights_N, sessions_N, measures_NM = (
        column.take() if column else None for column in columns
    )
    assert scores_N is not None
    assert labels_N is not None
    measures = {}
    if measures_NM is not None:
        measures = dict(zip(model.measures, measures_NM.T, strict=True))
    return Rows(
        scores_N=scores_N,
        labels_N=labels_N,
        weights_N=weights_N,
        sessions_N=sessions_N,
        measures=measures,
    )


def unit_numbers(dataset: Dataset, split: str, name: str) -> Tensor:
    """Returns the number of each row's unit, int64 [N]: the value of a column. A row without a
    known one is its own.

    Args:
        dataset: the prepared log.
        split: the part.
        name: a column of kind categorical or group.

    Raises:
        UserError: for another column.
    """
    unit_columns = {
        n: column
        for n, column in dataset.schema.columns.items()
        if column.kind in ("categorical", "group")
    }
    if name not in unit_columns:
        raise UserError(
            f"--units: {name!r} is no such column of {dataset.path}{suggest(name, unit_columns)};"
            " name a column of ids or the group column"
        )
    values_N = torch.tensor(dataset.column(name, split).to_numpy())
    if unit_columns[name].kind == "group":
        return values_N
    encoding = dataset.schema.encodings[str(unit_columns[name].table)]
    own_N = values_N < FIRST if encoding.is_numbered else values_N == 0
    return torch.where(own_N, -1 - torch.arange(len(values_N)), values_N)
