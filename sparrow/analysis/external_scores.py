"""Scores that another system gave the rows of a prepared log: a baseline column of the log, or a
file.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import torch
from torch import Tensor

from sparrow.analysis.scores import Rows
from sparrow.core.arrays import Float32s
from sparrow.core.errors import UserError, complaint, suggest
from sparrow.data.batches.dataset import Dataset
from sparrow.features.labels import labels
from sparrow.features.schema import Column
from sparrow.features.types import is_number


def column_scores(dataset: Dataset, split: str, name: str, label: str) -> Tensor:
    """Returns a baseline column of a part, float32 [N].

    Args:
        dataset: the prepared log.
        split: the part.
        name: of the column.
        label: the label that is judged.

    Raises:
        UserError: when there is no such baseline, or when it is of another label.
    """
    columns = dataset.schema.of_kind("baseline")
    if name not in columns:
        has = f"no baseline column of {dataset.path}{suggest(name, columns)}"
        raise UserError(f"{name}: not a run directory, no file of scores, and {has}")
    if label != dataset.schema.labels[0]:
        raise UserError(
            f"{name}: a baseline column is of the label {dataset.schema.labels[0]}; leave"
            " --label out"
        )
    return torch.cat([batch.dense_BC[:, 0] for batch in dict(dataset.baselines(split))[name]])


def file_scores(
    path: Path,
    rows: Rows,
    split: str,
    label: str,
    column: Column,
    impressions: str | None = None,
) -> Tensor:
    """Returns the scores of a Parquet or CSV file with a row for each row of a part, in its order,
    float32 [N].

    They are the file's column "score", or its only column. If the file has the label's column, it
    must agree. Counts do so divided by the impressions, if the file has both.

    Args:
        path: of the file.
        rows: of the part.
        split: the part.
        label: the label that is judged.
        column: says which of the label's values count as 1. A file may have these, or 0 and 1.
        impressions: the column of what the label counts, where it is a count.

    Raises:
        UserError: when the file cannot be read, has other rows than the part, or no probabilities.
    """
    try:
        table = pq.read_table(path) if path.suffix == ".parquet" else pyarrow.csv.read_csv(path)
        name = table.column_names[0] if table.num_columns == 1 else "score"
        if name not in table.column_names:
            raise UserError(
                f"{path}: no column 'score', it has {', '.join(table.column_names)}; rename that of"
                " scores"
            )
        scores_N = table[name].cast(pa.float64()).to_numpy()
        labels_N = None
        if label in table.column_names and impressions is None:
            labels_N = _labels(table[label].combine_chunks(), label, column)
        elif label in table.column_names and impressions in table.column_names:
            count_N = table[label].cast(pa.float64()).to_numpy()
            shown_N = table[impressions].cast(pa.float64()).to_numpy()
            labels_N = (count_N / np.maximum(shown_N, 1)).astype(np.float32)
    except (pa.ArrowException, OSError) as error:
        remedy = "give Parquet or CSV with a column 'score'"
        raise UserError(f"{path}: no file of scores ({complaint(error)}); {remedy}") from None
    if len(scores_N) != len(rows.labels_N):
        remedy = f"give a score for each row of {split}, in the prepared log's order"
        raise UserError(
            f"{path}: {len(scores_N):,} rows, and {split} has {len(rows.labels_N):,}; {remedy}"
        )
    bad = np.flatnonzero(~((scores_N >= 0) & (scores_N <= 1)))
    if len(bad):
        raise UserError(
            f"{path}, row {bad[0]}: score {scores_N[bad[0]]:g}; scores are probabilities in 0..1"
        )
    if labels_N is not None and not np.array_equal(labels_N, rows.labels_N.numpy(), equal_nan=True):
        own_N = rows.labels_N.numpy()
        row = int(np.flatnonzero((labels_N != own_N) & ~(np.isnan(labels_N) & np.isnan(own_N)))[0])
        remedy = "put its rows in the prepared log's order"
        raise UserError(f"{path}, row {row}: {label} is not that of row {row} of {split}; {remedy}")
    return torch.from_numpy(scores_N.astype(np.float32))


def _labels(raw: pa.Array, label: str, column: Column) -> Float32s:
    """Returns labels as numbers, float32 [N]."""
    if is_number(raw.type):
        numbers_N = raw.cast(pa.float32()).to_numpy(zero_copy_only=False)
        if (np.isin(numbers_N, (0, 1)) | np.isnan(numbers_N)).all():
            return numbers_N
    return labels(raw, label, column, training=False, row0=0, with_words=True).astype(np.float32)
