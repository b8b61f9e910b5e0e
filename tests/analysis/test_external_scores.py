from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import torch

from sparrow import data
from sparrow.analysis.external_scores import column_scores, file_scores
from sparrow.analysis.scores import Rows
from sparrow.core import UserError
from sparrow.features.schema import Column

ROWS = Rows(
    scores_N=torch.tensor([0.1, 0.2, 0.3]),
    labels_N=torch.tensor([0.0, 1.0, 0.0]),
    weights_N=None,
    sessions_N=None,
)
SCORES = [0.25, 0.5, 1.0]
LABEL = Column(kind="label")


def test_a_file_of_scores(tmp_path: Path) -> None:
    for columns in (
        {"p": SCORES},
        {"id": ["a", "b", "c"], "score": SCORES},
        {"score": SCORES, "label": [0, 1, 0]},
    ):
        table = pa.table(columns)
        pq.write_table(table, tmp_path / "s.parquet")
        pyarrow.csv.write_csv(table, tmp_path / "s.csv")
        for name in ("s.parquet", "s.csv"):
            assert file_scores(tmp_path / name, ROWS, "test", "label", LABEL).tolist() == SCORES


@pytest.mark.parametrize(
    ("column", "values"),
    [
        (Column(kind="label", positive="yes", negative="no"), ["no", "yes", "no"]),
        (Column(kind="label", positive="2", negative="1"), [1, 2, 1]),
        (Column(kind="label", threshold=4.0), [1.0, 5.0, 3.5]),
    ],
)
def test_a_file_has_labels_as_the_log_has_them(
    tmp_path: Path, column: Column, values: list
) -> None:
    """`predict --keep LABEL` copies them so."""
    for labels in (values, [0, 1, 0]):
        pq.write_table(pa.table({"score": SCORES, "label": labels}), tmp_path / "s.parquet")
        scores = file_scores(tmp_path / "s.parquet", ROWS, "test", "label", column)
        assert scores.tolist() == SCORES
    pq.write_table(
        pa.table({"score": SCORES, "label": [*values[:2], values[1]]}), tmp_path / "s.parquet"
    )
    with pytest.raises(UserError, match="row 2: label is not"):
        file_scores(tmp_path / "s.parquet", ROWS, "test", "label", column)


def test_rows_that_lack_the_label_have_scores_too(tmp_path: Path) -> None:
    rows = Rows(
        scores_N=ROWS.scores_N,
        labels_N=torch.tensor([0.0, torch.nan, 1.0]),
        weights_N=None,
        sessions_N=None,
    )
    pq.write_table(pa.table({"score": SCORES, "label": [0, None, 1]}), tmp_path / "s.parquet")
    assert file_scores(tmp_path / "s.parquet", rows, "test", "label", LABEL).tolist() == SCORES
    pq.write_table(pa.table({"score": SCORES, "label": [0, None, 0]}), tmp_path / "s.parquet")
    with pytest.raises(UserError, match="row 2: label is not"):
        file_scores(tmp_path / "s.parquet", rows, "test", "label", LABEL)


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"p": SCORES, "q": SCORES}, "no column 'score', it has p, q"),
        ({"score": SCORES[:2]}, "2 rows, and test has 3"),
        ({"score": [0.5, 1.5, 0.1]}, "row 1: score 1.5"),
        ({"score": [0.5, None, 0.1]}, "row 1: score nan"),
        ({"score": ["a", "b", "c"]}, "no file of scores"),
        ({"score": SCORES, "label": [0, 1, 1]}, "row 2: label is not that of row 2 of test"),
        ({"score": SCORES, "label": [0, None, 0]}, "row 1: label is not"),
    ],
)
def test_scores_of_other_rows_are_refused(tmp_path: Path, columns: dict, says: str) -> None:
    pq.write_table(pa.table(columns), tmp_path / "s.parquet")
    with pytest.raises(UserError, match=says):
        file_scores(tmp_path / "s.parquet", ROWS, "test", "label", LABEL)


def test_a_file_that_is_none(tmp_path: Path) -> None:
    for name in ("s.csv", "s.parquet"):
        (tmp_path / name).write_bytes(b"\x00\xff" * 40)
        with pytest.raises(UserError, match=rf"{name}: no"):
            file_scores(tmp_path / name, ROWS, "test", "label", LABEL)


def test_a_baseline_column(prepared: Path) -> None:
    dataset = data.open(prepared)
    found = column_scores(dataset, "test", "true_p", dataset.schema.labels[0])
    assert np.array_equal(found.numpy(), dataset.column("true_p", "test").to_numpy())
    with pytest.raises(
        UserError, match="not a run directory, no file of scores, and no baseline.*mean 'true_p'"
    ):
        column_scores(dataset, "test", "tru_p", dataset.schema.labels[0])
    with pytest.raises(UserError, match="a baseline column is of the label"):
        column_scores(dataset, "test", "true_p", "other")
