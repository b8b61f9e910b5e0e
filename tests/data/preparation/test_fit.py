"""Rows are divided into parts, and values fitted on the training part alone."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pytest

from sparrow import data
from sparrow.core import UserError
from sparrow.data import prepare
from sparrow.features.encodings import FIRST, MISSING, UNKNOWN
from sparrow.features.encodings.range import Range
from sparrow.features.hashing import hash_ids
from sparrow.features.schema import Column, Encoding, Schema, Split
from sparrow.features.transforms import Transforms
from tests.data.preparation.coarse import days_of, file_of
from tests.data.preparation.logs import SCHEMA, log_of, part, written


def test_values_are_fitted_on_the_training_part_alone(tmp_path: Path) -> None:
    raw = log_of(2000)
    made = prepare([written(tmp_path, raw)], tmp_path / "out", schema=SCHEMA)
    train = (part(tmp_path / "out", "train")["row"].to_numpy() * 2).astype(int)
    assert made.rows["train"] == len(train)
    assert sum(made.rows.values()) == 2000
    n = made.schema.columns["n"]
    assert (n.mean, n.std) == pytest.approx(
        (raw["n"][train].mean(), raw["n"][train].std()), rel=1e-12
    )
    assert made.schema.encodings["code"] == Encoding(
        kind="range", min_count=2, low=10, high=14, rows=7, distinct=5
    )
    distinct = len(np.unique(raw["sparse_id"][train]))
    assert made.schema.encodings["ids"] == Encoding(kind="hash", rows=4096, distinct=distinct)
    assert made.schema == Schema.load(tmp_path / "out" / "schema.toml")
    want = hash_ids(pa.array(raw["sparse_id"][train]))
    np.testing.assert_array_equal(part(tmp_path / "out", "train")["sparse_id"].to_numpy(), want)


def test_a_split_by_ratio_is_seeded_and_near_its_shares(tmp_path: Path) -> None:
    log = written(tmp_path, log_of(5000))
    rows = {}
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        made = prepare(
            [log], tmp_path / name, schema=SCHEMA, split=Split(valid=0.2, test=0.1, seed=seed)
        )
        assert made.rows["valid"] == pytest.approx(1000, abs=5 * math.sqrt(800))
        assert made.rows["test"] == pytest.approx(500, abs=5 * math.sqrt(450))
        rows[name] = part(tmp_path / name, "valid")["row"].to_pylist()
    assert rows["a"] == rows["b"]
    assert rows["a"] != rows["c"]


@pytest.mark.parametrize("kind", ["group", "session"])
def test_a_split_by_ratio_keeps_groups_whole(
    tmp_path: Path, kind: Literal["group", "session"]
) -> None:
    """Which part a group is in hangs on nothing but its id and the seed; rows without one are drawn
    one by one.
    """
    raw = log_of(6000)
    random = np.random.default_rng(5)
    # many, and half without one
    raw["g"] = [None if i < 1000 else f"{i}" for i in random.integers(0, 2000, 6000)]
    schema = replace(SCHEMA, columns=SCHEMA.columns | {"g": Column(kind=kind)})

    def parts_of(name: str, raw: dict, seed: int = 0) -> dict[str, set]:
        log = written(tmp_path, raw)
        made = prepare(
            [log], tmp_path / name, schema=schema, split=Split(valid=0.2, test=0.1, seed=seed)
        )
        assert (
            "split at random, all rows of one g in one part; no column is known to be a time"
            in made.notes
        )
        keys = {p: part(tmp_path / name, p)["g"].to_numpy() for p in ("train", "valid", "test")}
        assert (keys["valid"] <= 0).sum() == pytest.approx(600, abs=5 * math.sqrt(480))
        return {p: set(g_N[g_N > 0].tolist()) for p, g_N in keys.items()}

    found = parts_of("a", raw)
    assert not any(
        found[a] & found[b] for a, b in (("train", "valid"), ("train", "test"), ("valid", "test"))
    )
    assert len(found["valid"]) == pytest.approx(200, abs=5 * math.sqrt(160))
    order = random.permutation(6000)
    shuffled = {
        n: np.asarray(v)[order] if n != "g" else [v[i] for i in order.tolist()]
        for n, v in raw.items()
    }
    assert parts_of("b", shuffled) == found
    assert parts_of("numbers", raw | {"g": [i and int(i) for i in raw["g"]]}) == found
    assert parts_of("c", raw, seed=1) != found


def test_a_split_by_a_column_of_ids_is_that_by_a_group(tmp_path: Path) -> None:
    """The column is a feature, under its own name or another one; a row without an id is drawn for
    itself.
    """
    raw, random = log_of(6000), np.random.default_rng(5)
    users = [None if i < 200 else i for i in random.integers(0, 2000, 6000).tolist()]
    log = written(tmp_path, {**raw, "user": pa.array(users, pa.int64())})
    tables = {**SCHEMA.encodings, "user": Encoding()}
    found = {}
    for name, column in {
        "user": Column(kind="categorical", table="user"),
        "who": Column(kind="categorical", table="user", source="user"),
        "group": Column(kind="group", source="user"),
    }.items():
        schema = Schema(
            columns={**SCHEMA.columns, name: column},
            encodings=tables if column.table else SCHEMA.encodings,
        )
        split = Split(key="user", valid=0.2, test=0.1)
        made = prepare([log], tmp_path / name, schema=schema, split=split)
        assert made.schema.split == replace(split, by="ratio", key=name)
        assert (
            f"split at random, all rows of one {name} in one part; no column is known to be a time"
            in made.notes
        )
        found[name] = {
            p: (2 * part(made.out, p)["row"].to_numpy()).astype(int).tolist() for p in made.rows
        }
    assert found["user"] == found["who"] == found["group"]
    whose = {p: {users[i] for i in rows} - {None} for p, rows in found["user"].items()}
    assert not whose["train"] & whose["valid"]
    assert not whose["train"] & whose["test"]
    assert not whose["valid"] & whose["test"]
    assert len(whose["valid"]) == pytest.approx(360, abs=5 * math.sqrt(288))
    assert len(whose["test"]) == pytest.approx(180, abs=5 * math.sqrt(162))
    alone = {p: sum(users[i] is None for i in rows) for p, rows in found["user"].items()}
    assert alone["valid"] == pytest.approx(120, abs=5 * math.sqrt(96))


@pytest.mark.parametrize("negatives", [1.0, 0.5])
def test_rows_after_the_end_of_a_split_by_time_are_in_no_part(
    tmp_path: Path, negatives: float
) -> None:
    """Nothing is fitted on them, and their labels are in no count. What remains is as in a log that
    ends there.
    """
    raw, random = log_of(1000), np.random.default_rng(6)
    raw |= {"ts": random.permutation(1000), "user": random.integers(0, 9, 1000)}
    columns = {
        "ts": Column(kind="time"),
        "rate": Column(kind="numeric", source="user", counts="rate"),
    }
    schema = Schema(columns={**SCHEMA.columns, **columns}, encodings=SCHEMA.encodings)
    log = written(tmp_path, raw)
    split = Split(by="time", valid=0.1, test=0.25, until=0.75, negatives=negatives)
    made = prepare([log], tmp_path / "until", schema=schema, split=split)
    times = {p: part(made.out, p)["ts"].to_pylist() for p in made.rows}
    assert times["valid"] == [*range(400, 500)]
    assert times["test"] == [*range(500, 750)]
    assert max(times["train"]) < 400
    assert len(times["train"]) == 400 if negatives == 1 else 200 < len(times["train"]) < 400
    assert made.left_out == 1000 - sum(made.rows.values())
    assert "the first 75.0% of the rows in time are taken" in made.notes
    changed = raw | {"label": np.where(raw["ts"] >= 400, 1 - raw["label"], raw["label"])}
    if negatives == 1:
        other = prepare(
            [written(tmp_path, changed)], tmp_path / "changed", schema=schema, split=split
        )
        assert other.schema == made.schema
        assert part(other.out, "train").equals(part(made.out, "train"))


def test_what_no_end_of_a_split_can_be_is_said(tmp_path: Path) -> None:
    with pytest.raises(
        UserError,
        match=r"split\.until: 0.5 is a share of the time, and by is 'ratio'; leave one out",
    ):
        Split(by="ratio", until=0.5)
    with pytest.raises(UserError, match="valid 0.1 and test 0.4 leave no training rows"):
        Split(test=0.4, until=0.5)
    with pytest.raises(
        UserError, match=r"split\.until: 0.5 is a share of the time, and the split is by ratio"
    ):
        prepare(
            [written(tmp_path, log_of(200))],
            tmp_path / "out",
            schema=SCHEMA,
            split=Split(until=0.5),
        )


def test_what_no_split_by_a_column_can_be_is_said(tmp_path: Path) -> None:
    log = written(tmp_path, log_of(200))
    with pytest.raises(UserError, match=r"split\.key: no column 'cod'; did you mean 'code'"):
        prepare([log], tmp_path / "out", schema=SCHEMA, split=Split(key="cod"))
    with pytest.raises(
        UserError,
        match=r"split\.key: 'n' is of kind numeric, which names no ids; make it categorical",
    ):
        prepare([log], tmp_path / "out", schema=SCHEMA, split=Split(key="n"))
    with pytest.raises(
        UserError, match=r"split\.key: 'code' is drawn by ratio, and by is 'time'; leave one"
    ):
        Split(key="code", by="time")


@pytest.mark.parametrize("in_order", [True, False])
def test_a_split_by_time_keeps_time_order(tmp_path: Path, in_order: bool) -> None:
    raw = log_of(1000)
    time = np.arange(1000) // 3 + 5
    raw["ts"] = time if in_order else np.random.default_rng(3).permutation(time)
    columns = SCHEMA.columns | {"ts": Column(kind="time")}
    schema, split = replace(SCHEMA, columns=columns), Split(valid=0.2, test=0.0)
    made = prepare([written(tmp_path, raw)], tmp_path / "out", schema=schema, split=split)
    assert made.schema.split.by == "time"
    assert made.rows == {"train": 798, "valid": 202, "test": 0}  # rows of one time stay together
    table = pa.concat_tables([part(tmp_path / "out", name) for name in ("train", "valid", "test")])
    np.testing.assert_array_equal(table["ts"], time)
    # and, at one time, the log's order
    assert (np.diff(table["row"])[np.diff(time) == 0] > 0).all()
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["label_mean"]["test"] == {
        "label": None
    }


def test_a_given_schema_is_obeyed(tmp_path: Path) -> None:
    columns = {
        "label": Column(kind="label"),
        "n": Column(kind="numeric", transform="log", mean=5.0, std=4.0, low=-9.0, high=99.0),
        "one": Column(kind="categorical", table="fixed", source="code"),
        "two": Column(kind="categorical", table="mapped", source="code"),
        "row": Column(kind="ignore"),
    }
    tables = {
        "fixed": Encoding(kind="hash", rows=50),
        "mapped": Encoding(kind="range", min_count=1, low=12, high=13),
    }
    made = prepare(
        [written(tmp_path, log_of(500))],
        tmp_path / "out",
        schema=Schema(columns=columns, encodings=tables),
    )
    assert made.schema.columns == columns
    assert made.schema.encodings["fixed"] == Encoding(kind="hash", rows=50, distinct=5)
    assert made.schema.encodings["mapped"] == Encoding(
        kind="range", min_count=1, low=12, high=13, rows=4, distinct=5
    )
    assert set(part(tmp_path / "out", "train")["two"].to_pylist()) == {1, 2, 3}


def test_columns_that_share_a_table_are_fitted_together(tmp_path: Path) -> None:
    raw = {"label": [0, 1] * 5, "item": [3] * 10, "history": [[9, 3], []] * 5}
    columns = {
        "label": Column(kind="label"),
        "item": Column(kind="categorical", table="item"),
        "history": Column(kind="list", table="item"),
    }
    schema = Schema(columns=columns, encodings={"item": Encoding()})
    made = prepare(
        [written(tmp_path, raw)], tmp_path / "out", schema=schema, split=Split(valid=0, test=0)
    )
    assert made.schema.encodings["item"] == Encoding(
        kind="range", min_count=2, low=3, high=9, rows=9, distinct=2
    )
    assert part(tmp_path / "out", "train")["history"].to_pylist() == [[1, 1], []] + [[8, 2], []] * 4
    assert part(tmp_path / "out", "train")["item"].to_pylist() == [1] + [2] * 9


def test_parts_of_a_time_are_known_without_having_been_seen(tmp_path: Path) -> None:
    """Those of two weeks of days are trained on; those that training lacks have rows of their own,
    and it is told.
    """
    days = days_of(3000, 14)
    made = prepare([file_of(days, tmp_path / "days.parquet")], tmp_path / "days")
    table = made.schema.encodings["ts_weekday"]
    assert (table.kind, table.low, table.high, table.rows, table.distinct) == ("range", 0, 6, 9, 7)
    for name in ("train", "valid", "test"):
        rows = part(tmp_path / "days", name)
        weekdays = [
            (date(1970, 1, 1) + timedelta(microseconds=us)).weekday()
            for us in rows["ts"].to_pylist()
        ]
        assert rows["ts_weekday"].to_pylist() == [day + FIRST for day in weekdays]
    assert not any(
        "ts_weekday" in note
        for note in made.notes
        if "row of unknown ids" in note or "values of" in note
    )
    columns = made.schema.columns | {
        "month": Column(kind="categorical", source="ts", part="month", table="month")
    }
    schema = replace(
        made.schema, columns=columns, encodings=made.schema.encodings | {"month": Encoding()}
    )
    more = prepare([file_of(days, tmp_path / "log.parquet")], tmp_path / "month", schema=schema)
    told = (
        "training has 1 of the 12 values of month; the rows of the others stay as they begin, at"
        " random"
    )
    assert any(note.startswith(f"month: {told}") for note in more.notes)
    transforms = data.open(tmp_path / "month").transforms
    later = pa.table({"ts": [date(2026, 12, 24), None]})
    alone = replace(more.schema, columns={"month": columns["month"]})
    months = replace(transforms, schema=alone).transform(later, training=False)["month"].to_pylist()
    assert months == [12 - 1 + FIRST, MISSING]


def test_a_range_of_an_older_version_stays_as_it_was(tmp_path: Path) -> None:
    """It begins with the least hour of its training, and lacks some; growing makes these known, and
    later ones.
    """
    times = [datetime(2026, 3, 2) + timedelta(hours=3 * i) for i in range(400)]
    log = file_of(days_of(400, 1, ts=times), tmp_path / "log.parquet")
    made = prepare([log], tmp_path / "out")
    transforms = data.open(tmp_path / "out").transforms
    counts = np.full(15, Range.KNOWN, np.int32)
    counts[2] = 1
    table = Encoding(kind="range", min_count=2, low=3, high=17, rows=17, distinct=5)
    schema = replace(made.schema, encodings=made.schema.encodings | {"ts_hour": table})
    ends = {"ts": Column(kind="time")}  # nor does it say when its log was
    older = replace(
        transforms,
        schema=replace(schema, columns=schema.columns | ends),
        vocabularies={**transforms.vocabularies, "ts_hour": Range(3, counts)},
    )
    (tmp_path / "older").mkdir()
    older.save(tmp_path / "older")
    again = Transforms.load(tmp_path / "older")
    hours = pa.table({"ts": [datetime(2026, 1, 1, hour) for hour in (3, 5, 17, 18, 0)]})
    wanted = {"ts_hour": schema.columns["ts_hour"]}
    found = replace(again, schema=replace(again.schema, columns=wanted)).transform(
        hours, training=False
    )
    assert found["ts_hour"].to_pylist() == [FIRST, UNKNOWN, 14 + FIRST, UNKNOWN, UNKNOWN]
    assert not any("far" in note for note in prepare([log], tmp_path / "like", schema=again).notes)
    grown = prepare([log], tmp_path / "grown", schema=again, grow=True)
    assert (
        grown.schema.encodings["ts_hour"].low == 3 and grown.schema.encodings["ts_hour"].high == 21
    )
    rows = part(tmp_path / "grown", "train")["ts_hour"].to_numpy()
    assert ((rows != UNKNOWN) == (np.array([t.hour for t in times[: len(rows)]]) >= 3)).all()
