from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from sparrow.core import UserError
from sparrow.data import prepare
from sparrow.data.logs.tables import table_log
from sparrow.data.meaning.inference import infer_log
from sparrow.data.meaning.vectors import sized, vector_of
from sparrow.features.schema import Column, Schema

X = np.random.default_rng(0).normal(0, 1, (400, 5)).round(4)


def found(values: list | pa.Array) -> Column | None:
    array = values if isinstance(values, pa.Array) else pa.array(values)
    return vector_of(array, array.type)


def texts(between: str, start: str = "", end: str = "") -> list[str | None]:
    return [None, "", *(start + between.join(map(str, row)) + end for row in X.tolist())]


@pytest.mark.parametrize(
    ("values", "separator"),
    [
        (texts(","), ","),
        (texts(", ", "[", "]"), ","),
        (texts("; "), ";"),
        (texts("|"), "|"),
        (texts(" "), None),
        (texts("  ", "[ ", "\n]"), None),
        (X.tolist(), None),
        ([None, *X.tolist(), []], None),
        (pa.array(X.tolist(), pa.list_(pa.float32(), 5)), None),
    ],
)
def test_vectors_are_known_by_their_look(values: list | pa.Array, separator: str | None) -> None:
    column = found(values)
    assert column is not None and (column.kind, column.size, column.separator) == (
        "vector",
        5,
        separator,
    )
    assert "a vector of 5 numbers" in str(column.note)


@pytest.mark.parametrize(
    "values",
    [
        [[0.5], [1.5]],  # a list of one number
        [[0.5, 1.5], [1.5]],  # of changing length
        [[1, 2, 3, 4], [5, 6, 7, 8]],  # ids
        ["52.1,4.3", "48.2,16.3"],  # coordinates
        ["1,2,3,4", "5,6,7,8"],  # ids
        ["0.5,0.1,0.2,x", "0.5,0.1,0.2,0.3"],
        ["0.5,0.1,0.2,0.4", "0.5,0.1,0.2"],
        ["2013.05.07 12:30:11", "2013.05.08 12:30:11"],
        ["192.168.0.1", "192.168.0.2"],
        ["0.5 of 1.5 is 0.75", "1"],
        [None, None],
        [1.5, 2.5],
    ],
)
def test_what_is_none(values: list) -> None:
    assert found(values) is None


@pytest.mark.parametrize("form", ["lists", "texts"])
def test_a_few_broken_ones_do_not_hide_vectors(form: str, tmp_path: Path) -> None:
    """The preparation then stops at the first of them, and does not leave the column out in
    silence.
    """
    rows = X.tolist()
    rows[70] = rows[70][:2]
    emb = rows if form == "lists" else [" ".join(map(str, row)) for row in rows]
    assert found(emb) is not None and found(emb[70:71] + emb[:5]) is None
    table = pa.table(
        {"click": [i % 2 for i in range(400)], "ad": [i % 9 for i in range(400)], "emb": emb}
    )
    with pytest.raises(
        UserError, match=r"'emb', row 70: a vector of 2 numbers where others have 5; mend it"
    ):
        prepare(table_log(table), tmp_path / "out")
    ids = ["1,2,3,4"] * 39 + ["apple,e,b,c"]
    assert found(ids) is None


def test_a_vector_is_no_list_of_ids_and_no_weights_of_one(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    table = pa.table(
        {
            "click": rng.integers(0, 2, 400),
            "emb": X.tolist(),
            "text": texts(",", "[", "]")[2:],
            "tags": rng.integers(0, 50, (400, 2)).tolist(),
            "tags_weights": rng.random((400, 2)).tolist(),
        }
    )
    columns = infer_log(table_log(table)).columns
    assert {name: of.kind for name, of in columns.items()} == {
        "click": "label",
        "emb": "vector",
        "text": "vector",
        "tags": "list",
        "tags_weights": "ignore",
    }
    assert columns["tags"].weights == "tags_weights"


def test_the_size_is_that_of_the_first_one() -> None:
    log = table_log(
        pa.table({"v": [None, [], [1.0, 2.0, 3.0]], "w": ["?", None, "1;2"], "none": pa.nulls(3)})
    )
    columns = {
        "v": Column(kind="vector"),
        "w": Column(kind="vector", separator=";", missing=("?",)),
    }
    columns["told"] = Column(kind="vector", size=9, source="v")
    schema = sized(Schema(columns=columns), log)
    assert [column.size for column in schema.columns.values()] == [3, 2, 9]
    with pytest.raises(
        UserError,
        match=r"columns\.none: no vector in the first 3 rows of the table; set columns\.none",
    ):
        sized(Schema(columns={"none": Column(kind="vector")}), log)
