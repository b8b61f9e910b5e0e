from __future__ import annotations

import datetime
import math

import numpy as np
import pyarrow as pa
import pytest

from sparrow.core import UserError
from sparrow.data import Transforms
from sparrow.data.schema import Column, Schema, Table
from sparrow.features import hash_ids


def transform(schema: Schema, rows: pa.Table | pa.RecordBatch, **settings: object) -> pa.Table:
    return Transforms(schema=schema).transform(rows, **settings)  # type: ignore[arg-type]


def one(kind: str, values: pa.Array | list, *, training: bool = True, **settings: object) -> list:
    """What becomes of one column "x"."""
    schema = Schema(columns={"x": Column(kind=kind, **settings)})  # type: ignore[arg-type]
    return transform(schema, pa.table({"x": values}), training=training, row0=50)["x"].to_pylist()


def test_types_and_order_follow_the_schema() -> None:
    tables = {"a": Table(encoding="range", low=1, high=3, rows=4), "h": Table(encoding="hash", rows=16)}
    columns = {
        "one": Column(kind="numeric", mean=1.0, std=2.0),
        "ids": Column(kind="list", table="a", max_length=2),
        "two": Column(kind="categorical", table="h", source="raw"),
        "day": Column(kind="time"),
        "who": Column(kind="group"),
        "skip": Column(kind="ignore"),
        "y": Column(kind="label"),
    }
    raw = {
        "y": [1, 0],
        "raw": ["k", None],
        "one": [5, None],
        "ids": [[1, 2, 3], None],
        "day": [datetime.date(1970, 1, 2)] * 2,
        "who": ["u", "u"],
    }
    table = transform(Schema(columns=columns, tables=tables), pa.RecordBatch.from_pydict(raw), training=True)
    assert table.to_pydict() == {
        "one": [2.0, 0.0],
        "ids": [[2, 3], []],
        "two": hash_ids(pa.array(["k", None])).tolist(),
        "day": [86_400_000_000] * 2,
        "who": hash_ids(pa.array(["u", "u"])).tolist(),
        "y": [1.0, 0.0],
    }
    assert [str(kind) for kind in table.schema.types] == [
        "float",
        "large_list<item: int32>",
        "int64",
        "int64",
        "int64",
        "float",
    ]


def test_a_range_counts_from_one_and_sends_the_rest_to_zero() -> None:
    tables = {"x": Table(encoding="range", low=5, high=9, rows=6)}
    schema = Schema(columns={"x": Column(kind="categorical", table="x")}, tables=tables)

    def rows(values: list | pa.Array) -> list:
        return transform(schema, pa.table({"x": values}), training=False)["x"].to_pylist()

    assert rows([5, 9, 4, 10, None, -(1 << 63), (1 << 63) - 1]) == [1, 5, 0, 0, 0, 0, 0]
    assert rows(["5", "9", "12345678901234567890", None]) == [1, 5, 0, 0]
    assert rows(pa.array([5, 1 << 63, None], pa.uint64())) == [1, 0, 0]
    with pytest.raises(UserError, match=r"'x'.*numbers integers.*'k'.*hash"):
        rows(["5", "k"])


@pytest.mark.parametrize(
    ("values", "positive", "want"),
    [
        ([1, 0], None, [1, 0]),
        ([True, False], None, [1, 0]),
        (["no", "yes"], "yes", [0, 1]),
        ([-1, 2], "2", [0, 1]),
        ([2.0, 1.0], "2", [1, 0]),
    ],
)
def test_labels(values: list, positive: str | None, want: list[int]) -> None:
    assert one("label", values, positive=positive) == want


@pytest.mark.parametrize(
    ("kind", "values", "words"),
    [
        ("label", [0, 2], r"label 'x', row 51: 2; .*positive"),
        ("label", [0, None], r"label 'x', row 51: missing"),
        ("label", [0.0, math.nan], r"label 'x', row 51: missing"),
        ("label", ["a", "b"], r"label 'x': string where 0 and 1 are needed; set columns\.x\.positive"),
        ("weight", [1.0, -2.0], r"weight 'x', row 51: -2; "),
        ("weight", [1.0, None], r"weight 'x', row 51: nan; "),
        ("time", [1, None], r"time 'x', row 51: missing"),
        ("time", ["noon", "dusk"], r"time 'x', row 50: 'noon' is not ISO 8601.*columns\.x\.format"),
        ("time", [1.5, 2.5], r"time 'x', row 50: 1.5 is no whole number"),
        ("group", [1.5, 2.5], r"'x', row 50: 1.5 .*is not an id"),
        ("numeric", [1.5, 2.5], r"columns\.x\.mean: not fitted"),
    ],
)
def test_values_that_do_not_fit_are_named(kind: str, values: list, words: str) -> None:
    with pytest.raises(UserError, match=words):
        one(kind, values)


def test_a_positive_that_is_no_number_for_a_label_of_numbers() -> None:
    with pytest.raises(UserError, match=r"columns\.x\.positive: 'yes' is not a number"):
        one("label", [1, 2], positive="yes")


def test_serving_needs_features_alone() -> None:
    roles = {kind: Column(kind=kind) for kind in ("label", "weight", "time", "group")}  # type: ignore[arg-type]
    schema = Schema(columns={**roles, "n": Column(kind="numeric", transform="none")})
    assert transform(schema, pa.table({"n": [1.0]}), training=False).column_names == ["n"]
    assert np.isnan(one("label", pa.array([None], pa.int64()), training=False)).all()
    with pytest.raises(UserError, match=r"columns\.n: no column 'n' in the log; did you mean 'm'|known: label"):
        transform(schema, pa.table({"label": [1]}), training=False)
    with pytest.raises(UserError, match=r"columns\.label: no column 'label'"):
        transform(schema, pa.table({"n": [1.0]}), training=True)
