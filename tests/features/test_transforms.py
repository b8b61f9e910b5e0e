from __future__ import annotations

import datetime
import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from sparrow import features
from sparrow.core import UserError
from sparrow.features import transforms as transforms_module
from sparrow.features.encodings import UNKNOWN
from sparrow.features.encodings.range import Range
from sparrow.features.encodings.vocabulary import Vocabulary
from sparrow.features.hashing import hash_ids
from sparrow.features.schema import Column, Encoding, Schema
from sparrow.features.transforms import Transforms


def transform(schema: Schema, rows: pa.Table | pa.RecordBatch, **settings: object) -> pa.Table:
    ranges = {
        name: Range(table.low, np.full(table.high - table.low + 1, Range.KNOWN, np.int32))
        for name, table in schema.encodings.items()
        if table.low is not None and table.high is not None
    }
    return Transforms(schema=schema, vocabularies=ranges).transform(rows, **settings)  # type: ignore[arg-type]


def one(kind: str, values: pa.Array | list, *, training: bool = True, **settings: object) -> list:
    """What becomes of one column "x"."""
    tables = {"t": Encoding(kind="hash", rows=16)} if "table" in settings else {}
    schema = Schema(columns={"x": Column(kind=kind, **settings)}, encodings=tables)  # type: ignore[arg-type]
    return transform(schema, pa.table({"x": values}), training=training, row0=50)["x"].to_pylist()


def test_types_and_order_follow_the_schema() -> None:
    tables = {
        "a": Encoding(kind="range", low=1, high=3, rows=5),
        "h": Encoding(kind="hash", rows=16),
    }
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
    table = transform(
        Schema(columns=columns, encodings=tables), pa.RecordBatch.from_pydict(raw), training=True
    )
    assert table.to_pydict() == {
        "one": [2.0, 0.0],
        "ids": [[3, 4], []],
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


def test_a_range_counts_from_two_and_knows_no_others() -> None:
    tables = {"x": Encoding(kind="range", low=5, high=9, rows=7)}
    schema = Schema(columns={"x": Column(kind="categorical", table="x")}, encodings=tables)

    def rows(values: list | pa.Array) -> list:
        return transform(schema, pa.table({"x": values}), training=False)["x"].to_pylist()

    assert rows([5, 9, 4, 10, None, -(1 << 63), (1 << 63) - 1]) == [2, 6, 1, 1, 0, 1, 1]
    beyond = [str(10**18 * 5), str(1 << 63), "-12345678901234567890", "9" * 40]
    assert rows(["5", "9", *beyond, None]) == [2, 6, 1, 1, 1, 1, 0]
    assert rows(pa.array([5, 1 << 63, None], pa.uint64())) == [2, 1, 0]
    with pytest.raises(UserError, match=r"'x', row 1: 'k' is no integer.*numbers integers.*hash"):
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
    ("values", "positive", "negative", "says"),
    [
        (["no", "Yes"], "yes", "no", "'Yes' is neither 'yes' nor 'no'; mend it, or leave columns"),
        (["yes", "maybe"], "yes", "no", "'maybe' is neither"),
        ([1, 3], "2", "1", "3 is neither '2' nor '1'"),
    ],
)
def test_a_label_of_two_values_has_no_third(
    values: list, positive: str, negative: str, says: str
) -> None:
    with pytest.raises(UserError, match=f"label 'x', row 51: {says}"):
        one("label", values, positive=positive, negative=negative)
    assert one("label", values, positive=positive) in ([0, 0], [1, 0])


@pytest.mark.parametrize(
    ("kind", "values", "words"),
    [
        ("label", [0, 2], r"label 'x', row 51: 2; .*positive"),
        ("label", [0, None], r"label 'x', row 51: missing"),
        ("label", [0.0, math.nan], r"label 'x', row 51: missing"),
        (
            "label",
            ["a", "b"],
            r"label 'x': string where 0 and 1 are needed; set columns\.x\.positive",
        ),
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


@pytest.mark.parametrize(
    ("values", "settings"),
    [
        ([1, None, 0], {}),
        ([1.0, math.nan, 0.0], {}),
        (["yes", None, "no"], {"positive": "yes"}),
        ([5, None, 2], {"threshold": 3.0}),
        ([1, -1, 0], {"missing": ("-1",)}),
        (["yes", "?", "no"], {"positive": "yes", "missing": ("?",)}),
    ],
)
def test_of_several_labels_one_may_be_missing(values: list, settings: dict) -> None:
    columns = {"a": Column(kind="label"), "b": Column(kind="label", **settings)}
    rows = pa.table({"a": [0, 1, 1], "b": values})
    found = Transforms(schema=Schema(columns=columns)).transform(rows, training=True)
    assert found["a"].to_pylist() == [0, 1, 1]
    assert str(found["b"].to_pylist()) == "[1.0, nan, 0.0]"
    alone = Transforms(schema=Schema(columns={"b": columns["b"]}))
    with pytest.raises(
        UserError, match=r"label 'b', row 1: missing; leave rows without a label out of the log"
    ):
        alone.transform(rows, training=True)


def test_a_positive_that_is_no_number_for_a_label_of_numbers() -> None:
    with pytest.raises(UserError, match=r"columns\.x\.positive: 'yes' is not a number"):
        one("label", [1, 2], positive="yes")


def test_serving_needs_features_alone() -> None:
    roles = {kind: Column(kind=kind) for kind in ("label", "weight", "time", "group")}  # type: ignore[arg-type]
    schema = Schema(columns={**roles, "n": Column(kind="numeric", transform="none")})
    assert transform(schema, pa.table({"n": [1.0]}), training=False).column_names == ["n"]
    assert np.isnan(one("label", pa.array([None], pa.int64()), training=False)).all()
    with pytest.raises(
        UserError, match=r"columns\.n: no column 'n' in the log; did you mean 'm'|known: label"
    ):
        transform(schema, pa.table({"label": [1]}), training=False)
    with pytest.raises(UserError, match=r"columns\.label: no column 'label'"):
        transform(schema, pa.table({"n": [1.0]}), training=True)


TEXTS = {
    "spaces": (None, None, ["1 2 3", "3", "", None, " 1  7 "]),
    "pipes": ("|", None, ["a|b", "b", "b||c", None, ""]),
    "json": ("json", None, ["[1, 2]", '["a,b", "c"]', "[]", None, "[null, 3, 4, 5, 6]"]),
    "weighted": (None, ":", ["1:0.5 2:-0.0", "2:0.0", None, "3:1 4:2 5:3 6:4"]),
    "weights apart": (None, "w", ["1 2", "3", None]),
}


@pytest.mark.parametrize("kind", TEXTS)
@pytest.mark.parametrize("encoding", ["vocabulary", "hash"])
def test_lists_converted_once_for_a_run_are_those_of_every_row(
    kind: str, encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    separator, weights, texts = TEXTS[kind]
    random = np.random.default_rng(0)
    rows = np.repeat(random.integers(0, len(texts), 60), random.integers(1, 9, 60))
    raw = {"x": pa.array([texts[i] for i in rows])}
    if weights == "w":  # changes where x does not
        w_N = np.repeat(random.integers(0, 2, len(rows) // 3 + 1), 3)[: len(rows)]
        raw["w"] = pa.array(
            [("0.5 1" if w else "-0.0 2", "1", None)[i] for i, w in zip(rows, w_N, strict=True)]
        )
    known = Vocabulary(hash_ids(pa.array(["1", "2", "b", "a,b"])), np.ones(4, np.int64))
    column = Column(kind="list", table="t", max_length=3, separator=separator, weights=weights)
    schema = Schema(
        columns={"x": column}, encodings={"t": Encoding(kind=encoding, rows=known.rows)}
    )  # type: ignore[arg-type]
    transforms = Transforms(schema=schema, vocabularies={"t": known})
    found = transforms.transform(pa.table(raw).slice(1), training=False)
    monkeypatch.setattr(features.lists, "WORTH", math.inf)
    plain = transforms.transform(pa.table(raw).slice(1), training=False)
    assert found.schema == plain.schema
    for name in plain.column_names:
        one, other = (table[name].combine_chunks() for table in (found, plain))
        assert one.equals(other)
        numbers = [values.flatten().to_numpy() for values in (one, other)]
        assert numbers[0].tobytes() == numbers[1].tobytes()  # 0.0 is not -0.0
    if encoding == "vocabulary":
        assert UNKNOWN in plain["x"].combine_chunks().flatten().to_pylist()


@pytest.mark.parametrize(("texts", "rows"), [(["1", "2", "2", "3"], 4), (["1", "2", "2"], 2)])
def test_lists_are_converted_once_from_three_rows_for_two_on(
    texts: list[str], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    converted: list[int] = []
    as_lists = features.lists.as_lists

    def counted(raw: pa.Array, *more: Any) -> Any:
        converted.append(len(raw))
        return as_lists(raw, *more)

    monkeypatch.setattr(features.lists, "as_lists", counted)
    assert one("list", texts, table="t") == one("list", [[text] for text in texts], table="t")
    assert converted == [rows, len(texts)]  # lists that come as such are not compared


def test_a_bad_list_behind_a_run_is_named_with_its_row() -> None:
    with pytest.raises(UserError, match="'x', row 54: '\\[1' is no flat JSON array"):
        one("list", ["[1]"] * 4 + ["[1"], table="t", separator="json")


def test_an_id_is_hashed_and_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often it stands in the rows, that repeat or not."""
    rows_of, asked = Vocabulary.rows_of, []

    def counted(self: Vocabulary, hashes_U: np.ndarray) -> np.ndarray:
        asked.append(len(hashes_U))
        return rows_of(self, hashes_U)

    monkeypatch.setattr(Vocabulary, "rows_of", counted)
    hashed: list[int] = []
    monkeypatch.setattr(
        transforms_module, "hash_ids", lambda ids: hashed.append(len(ids)) or hash_ids(ids)
    )
    schema = Schema(
        columns={"x": Column(kind="list", table="t"), "y": Column(kind="categorical", table="t")},
        encodings={"t": Encoding(kind="vocabulary", rows=2)},
    )
    transforms = Transforms(
        schema=schema, vocabularies={"t": Vocabulary(*np.empty((2, 0), np.int64))}
    )
    transforms.transform(
        pa.table({"x": [["a", "b"], ["b", "a"]] * 50, "y": ["a"] * 99 + ["c"]}), training=False
    )
    assert asked == hashed == [2, 2]


@pytest.mark.parametrize(
    ("values", "format", "hours"),
    [
        (["21/11/2026 10:00", None, "22/11/2026 23:59"], "%d/%m/%Y %H:%M", [10, None, 23]),
        ([1_795_255_200_000, 1_795_262_400_000, None], None, [10, 12, None]),
        ([None, None], None, [None, None]),
    ],
)
def test_a_part_of_a_time_is_an_id(values: list, format: str | None, hours: list) -> None:
    encoding = Encoding(kind="range", low=0, high=23, rows=26)
    column = Column(kind="categorical", source="ts", part="hour", table="hour", format=format)
    schema = Schema(columns={"hour": column}, encodings={"hour": encoding})
    made = transform(schema, pa.table({"ts": values}), training=False)
    assert made["hour"].to_pylist() == [0 if hour is None else hour + 2 for hour in hours]
