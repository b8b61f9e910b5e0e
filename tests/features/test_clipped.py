"""Numbers beyond training's range are clipped and counted; where they are missing is a column that
models learn.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparrow import data
from sparrow.core import UserError
from sparrow.data.preparation.job import Prepared
from sparrow.features.clipped import Clipped
from sparrow.features.schema import Column, Schema, Split
from sparrow.features.skew import Skew

KINDS = {
    "label": Column(kind="label"),
    "x": Column(kind="numeric"),
    "long": Column(kind="numeric", transform="log"),
    "plain": Column(kind="numeric", transform="none"),
    "whole": Column(kind="numeric"),
}
SCHEMA = Schema(columns=KINDS, split=Split(by="file"))


def raw(rows: int, high: float) -> pa.Table:
    """Whole numbers -5 to `high`; some of x are missing."""
    at = np.arange(rows)
    x = np.linspace(-5, high, rows).round()
    return pa.table(
        {"label": at % 2, "x": pa.array(x, mask=at % 7 == 3), "long": x, "plain": x, "whole": x}
    )


@pytest.fixture
def out(tmp_path: Path) -> Prepared:
    pq.write_table(raw(300, 20), tmp_path / "train.parquet")
    later = raw(100, 20).to_pydict()
    later["x"][7], later["long"][40], later["long"][9], later["plain"][9] = 1e12, -1e9, 1e9, 1e9
    pq.write_table(pa.table(later), tmp_path / "valid.parquet")
    schema = replace(SCHEMA, split=Split(by="file", valid_files=(str(tmp_path / "valid.parquet"),)))
    return data.prepare([tmp_path / "train.parquet"], tmp_path / "out", schema=schema)


def rows_of(made: Prepared, part: str) -> pa.Table:
    return pq.read_table(made.out / part / "part-00000.parquet")


def test_the_range_is_trainings_and_what_is_beyond_is_counted(out: Prepared) -> None:
    assert {
        (c.low, c.high) for c in out.schema.columns.values() if c.transform in ("standard", "log")
    } == {(-5, 20)}
    valid = {name: np.array(rows_of(out, "valid")[name]) for name in out.schema.dense}
    train = {name: np.array(rows_of(out, "train")[name]) for name in out.schema.dense}
    assert valid["x"][7] == train["x"].max()
    assert (valid["long"][40], valid["long"][9]) == (train["long"].min(), train["long"].max())
    assert valid["plain"][9] == 1e9  # kept, as it says
    found = [note for note in out.notes if "training's range" in note]
    assert found == [
        (
            "long: 2 numbers beyond training's range, clipped to -5 .. 20; the first is 1e+09 in"
            " row 309"
        ),
        "x: 1 number beyond training's range, clipped to -5 .. 20; the first is 1e+12 in row 307",
    ]


def test_rows_to_score_are_clipped_alike(out: Prepared) -> None:
    transforms = data.open(out.out).transforms
    rows = {
        "x": [20.0, 1e30, None],
        "long": [20.0, 1000.0, 0.0],
        "plain": [-5.0, -6.0, 0.0],
        "whole": [0.0, -1e9, None],
    }
    skew = Skew()
    found = transforms.transform(pa.table(rows), training=False, row0=10, skew=skew).to_pydict()
    for name in ("x", "long"):
        assert found[name][0] == found[name][1]
    assert skew.clipped.counts == {
        "x": (1, 11, 1e30),
        "long": (1, 11, 1000.0),
        "whole": (1, 11, -1e9),
    }
    assert found["x:missing"] == [0, 0, 1]
    # as the mean, where training never had one missing
    assert found["x"][2] == found["whole"][2] == 0


def test_only_columns_with_missing_numbers_have_one_beside_them(out: Prepared) -> None:
    assert out.schema.dense == ("x", "x:missing", "long", "plain", "whole")
    table = rows_of(out, "train")
    assert table["x:missing"].to_pylist() == [float(i % 7 == 3) for i in range(300)]
    assert np.array(table["x"])[3] == 0
    batch = next(iter(data.open(out.out).loader(16)))
    assert batch.dense_BC[:, 1].tolist() == [float(i % 7 == 3) for i in range(16)]


def test_a_schema_that_is_passed_back_stays(out: Prepared, tmp_path: Path) -> None:
    """With the column, without it (which is how to do without), and with a range that somebody
    wrote.
    """
    split = Split(by="ratio", valid=0, test=0)

    def again(schema: Schema, name: str) -> Prepared:
        return data.prepare(
            [tmp_path / "train.parquet"], tmp_path / name, schema=schema, split=split
        )

    assert again(out.schema, "a").schema.columns == out.schema.columns
    without = {name: column for name, column in out.schema.columns.items() if name != "x:missing"}
    assert "x:missing" not in again(replace(out.schema, columns=without), "b").schema.columns
    narrow = without | {"plain": replace(without["plain"], low=0.0, high=4.0)}
    plain = np.array(rows_of(again(replace(out.schema, columns=narrow), "c"), "train")["plain"])
    assert (plain.min(), plain.max()) == (0, 4)
    with pytest.raises(
        UserError,
        match="columns.x:missing: tells where another numeric column has none; leave it out",
    ):
        replace(out.schema, columns=out.schema.columns | {"x": Column(kind="ignore")})


def test_counts_add_up_in_any_order() -> None:
    column = Column(kind="numeric", low=0.0, high=1.0)
    x_N = np.array([0.5, 2, np.nan, -1, 1, 7])
    whole, parts = Clipped(), [Clipped(), Clipped(), Clipped()]
    whole.add("x", column, x_N, 100)
    for k in (2, 0, 1):
        parts[k].add("x", column, x_N[2 * k : 2 * k + 2], 100 + 2 * k)
    one = Clipped()
    for k in (1, 2, 0):
        one.merge(parts[k])
    assert one == whole == Clipped({"x": (3, 101, 2.0)})


def test_a_column_of_that_name_is_the_logs_own(tmp_path: Path) -> None:
    """On either side of the column that it seems to tell of."""
    x = np.arange(300.0)
    for names in (("x:missing", "x"), ("x", "x:missing")):
        table = pa.table(
            {"label": np.arange(300) % 2, **{name: x if name == "x" else x[::-1] for name in names}}
        )
        pq.write_table(table, tmp_path / "log.parquet")
        columns = {"label": Column(kind="label"), **dict.fromkeys(names, Column(kind="numeric"))}
        schema = Schema(columns=columns, split=Split(by="ratio", valid=0, test=0))
        made = data.prepare([tmp_path / "log.parquet"], tmp_path / names[0], schema=schema)
        train = rows_of(made, "train")
        np.testing.assert_array_equal(np.array(train["x:missing"]), np.array(train["x"])[::-1])
