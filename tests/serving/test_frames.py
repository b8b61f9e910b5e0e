"""Rows in every form that a scorer takes are the rows of a log in that form."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import sparrow
from sparrow.core import Batch, UserError
from sparrow.features.encodings.vocabulary import Vocabulary
from sparrow.features.hashing import hash_ids
from sparrow.features.rows import raw_batches
from sparrow.features.schema import Column, Encoding, Schema
from sparrow.features.transforms import Transforms
from sparrow.serving import Scorer, load
from sparrow.serving.export import export
from sparrow.serving.frames import is_frame
from sparrow.serving.requests import Encoder
from sparrow.trained.scorer import restore
from tests.serving.test_scorer import log_with_all_columns, served

pd, pl = pytest.importorskip("pandas"), pytest.importorskip("polars")
CLOSE = 1e-6  # products of other shapes sum in another order


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("frames")


@pytest.fixture(scope="module")
def scorer(place: Path) -> Scorer:
    return served(log_with_all_columns(place), place / "log.parquet", place)


@pytest.fixture(scope="module")
def table(scorer: Scorer, place: Path) -> pa.Table:
    return pq.read_table(place / "log.parquet").slice(0, 20)


FORMS: dict[str, Callable[[pa.Table], Any]] = {
    "mappings": lambda table: table.to_pylist(),
    "generator": lambda table: (row for row in table.to_pylist()),
    "lists": lambda table: table.to_pydict(),
    "numpy": lambda table: {name: table[name].to_numpy() for name in table.column_names},
    "torch": lambda table: {
        name: torch.tensor(of.to_pylist()) if pa.types.is_floating(of.type) else of.to_pylist()
        for name, of in zip(table.column_names, table.columns, strict=True)
    },
    "chunked": lambda table: {name: table[name] for name in table.column_names},
    "arrays": lambda table: {name: table[name].combine_chunks() for name in table.column_names},
    "series": lambda table: dict(table.to_pandas().items()),
    "polars series": lambda table: {of.name: of for of in pl.from_arrow(table)},
    "pandas": lambda table: table.to_pandas(),
    "polars": lambda table: pl.from_arrow(table),
    "arrow": lambda table: table,
    "batch": lambda table: table.combine_chunks().to_batches()[0],
    "reader": lambda table: table.to_reader(),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_has_the_scores_of_the_log(
    form: str, scorer: Scorer, table: pa.Table, place: Path
) -> None:
    """Also of candidates, with the columns of the label and others beside them, and of several
    requests.
    """
    give, expected = FORMS[form], restore(place / "run").score_rows(table)
    is_exact = form != "torch"  # its numbers are float32
    close = CLOSE if is_exact else 1e-3
    assert np.abs(scorer.score(give(table)) - expected).max() <= close
    user, own = table.select(["x", "id"]), table.drop_columns(["x", "id"])
    ones = user.slice(3, 1)
    crossed = own.append_column("x", pa.array([ones["x"][0].as_py()] * 20)).append_column(
        "id", pa.array([ones["id"][0].as_py()] * 20)
    )
    wanted = scorer.score(crossed)
    assert np.abs(scorer.rank(ones.to_pylist()[0], give(own)) - wanted).max() <= close
    for one_row in (ones, ones.to_pandas(), pl.from_arrow(ones)):
        assert np.abs(scorer.rank(one_row, give(own)) - wanted).max() <= close
    two = scorer.rank_all(
        [(ones.to_pylist()[0], give(own)), (ones.to_pylist()[0], own.slice(0, 2).to_pylist())]
    )
    assert np.abs(two[0] - wanted).max() <= close and np.abs(two[1] - wanted[:2]).max() <= close
    assert scorer.score(
        give(table.slice(0, 0)) if form != "batch" else table.slice(0, 0)
    ).shape == (0, 1)


def test_a_frame_is_scored_in_blocks(
    scorer: Scorer, table: pa.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = scorer.score(table)
    monkeypatch.setattr("sparrow.serving.scorer.BLOCK", 7)
    assert np.abs(scorer.score(table) - whole).max() <= CLOSE
    with pytest.raises(UserError, match="column 'x', row 19: 'much' is no number"):
        scorer.score(table.drop_columns(["x"]).append_column("x", pa.array(["1"] * 19 + ["much"])))


def test_frames_with_structs_and_lists_of_candidates(tmp_path: Path) -> None:
    """A scorer takes the frame that `predict` takes, whose rows become several."""
    random, count = np.random.default_rng(0), 400
    people = [{"age": float(i % 50), "city": f"c{i % 3}"} for i in range(count)]
    shown = [[f"i{i}" for i in random.permutation(9)[:4]] for _ in range(count)]
    frame = pa.table({"user": people, "inview": shown, "clicks": [of[:1] for of in shown]})
    pq.write_table(frame, tmp_path / "log.parquet")
    fitted = sparrow.fit(
        frame, run_dir=tmp_path / "run", settings={"threads": 1, "loop.max_steps": 3}
    )
    export(tmp_path / "run", tmp_path / "model", [tmp_path / "log.parquet"])
    scorer, asked = load(tmp_path / "model"), frame.drop_columns(["clicks"]).slice(0, 10)
    scores = scorer.score(asked)
    assert scores.shape == (40, 1) and np.abs(scores[:, 0] - fitted.predict(asked)).max() <= CLOSE
    ranked = scorer.rank(asked.slice(0, 1).select(["user"]), pa.table({"inview": shown[0]}))
    assert np.abs(ranked - scores[:4]).max() <= CLOSE


# -- every type of Arrow ---------------------------------------------------------------------------

TEXTS = ["12", None, "a", "12"]
NUMBERS = [12.0, None, 3.0, -7.0]
TIMES = [
    datetime.datetime(2026, 11, 21, 10),
    None,
    datetime.datetime(1969, 12, 31, 23),
    datetime.datetime(2024, 2, 29),
]
FRACTIONS = [Decimal("9.99"), None, Decimal("10.00"), Decimal("-0.10")]
WHOLE = [Decimal(12), None, Decimal("12.00"), Decimal(10) ** 20]


def column_of(kind: pa.DataType) -> list[pa.Array]:
    """Columns of a type, [4] each."""
    if pa.types.is_decimal(kind):
        return [pa.array(of[: 4 if kind.bit_width > 64 else 3], kind) for of in (FRACTIONS, WHOLE)]
    if pa.types.is_temporal(kind):
        return [pa.array(TIMES, pa.timestamp("us")).cast(kind, safe=False)]
    if pa.types.is_boolean(kind):
        return [pa.array([True, None, False, True])]
    if pa.types.is_integer(kind):
        most = (1 << kind.bit_width - (pa.types.is_signed_integer(kind))) - 1
        return [pa.array([12, None, 3, most], kind)]
    if pa.types.is_floating(kind):
        return [
            pa.array(np.array([12.0, np.nan, 3.0, -7.0]), pa.float64()).cast(kind),
            pa.array(NUMBERS, kind),
        ]
    if pa.types.is_fixed_size_binary(kind):
        return [pa.array([b"ab", None, b"cd", b"ab"], kind)]
    if kind in (pa.string_view(), pa.binary_view(), pa.binary(), pa.large_binary()):
        return [
            pa.array(TEXTS).cast(pa.binary() if "binary" in str(kind) else pa.string()).cast(kind)
        ]
    return [pa.array(TEXTS, kind)]


TYPES = [
    *(
        pa.int8(),
        pa.int16(),
        pa.int32(),
        pa.int64(),
        pa.uint8(),
        pa.uint16(),
        pa.uint32(),
        pa.uint64(),
    ),
    *(
        pa.float16(),
        pa.float32(),
        pa.float64(),
        pa.bool_(),
        pa.decimal32(5, 2),
        pa.decimal64(12, 2),
    ),
    *(pa.decimal128(30, 2), pa.decimal256(40, 2), pa.string(), pa.large_string(), pa.string_view()),
    *(pa.binary(), pa.large_binary(), pa.binary_view(), pa.binary(2), pa.date32(), pa.date64()),
    *(
        pa.timestamp("s"),
        pa.timestamp("ms"),
        pa.timestamp("us"),
        pa.timestamp("ns"),
        pa.timestamp("us", "UTC"),
    ),
]


def transforms() -> Transforms:
    hashes = hash_ids(pa.array(["12", "a", "true", "ab", "3"]))
    words = Vocabulary(hashes, np.ones(len(hashes), np.int64))
    columns = {
        "word": Column(kind="categorical", table="words", source="c"),
        "hashed": Column(kind="categorical", table="hashes", source="c"),
        "number": Column(kind="numeric", transform="none", source="c"),
        "bucket": Column(
            kind="categorical", table="buckets", quantiles=3, boundaries=(-0.1, 9.99), source="c"
        ),
        "hour": Column(kind="categorical", table="hour", source="c", part="hour"),
        "list": Column(kind="list", table="words", source="c", max_length=2),
        "vector": Column(kind="vector", transform="none", source="c", size=2),
    }
    encodings = {
        "words": Encoding(kind="vocabulary", rows=words.rows, digest=words.digest, min_count=1),
        "hashes": Encoding(kind="hash", rows=64),
        "buckets": Encoding(kind="range", low=0, high=2, rows=5),
        "hour": Encoding(kind="range", low=0, high=23, rows=26, min_count=1),
    }
    return Transforms(
        schema=Schema(columns=columns, encodings=encodings), vocabularies={"words": words}
    )


def alone(name: str) -> Transforms:
    whole = transforms()
    column = whole.schema.columns[name]
    encodings = (
        {str(column.table): whole.schema.encodings[str(column.table)]} if column.table else {}
    )
    return Transforms(
        schema=Schema(columns={name: column}, encodings=encodings),
        vocabularies={of: known for of, known in whole.vocabularies.items() if of in encodings},
    )


def assert_same(one: Batch, other: Batch) -> None:
    assert torch.equal(one.dense_BC.view(torch.int32), other.dense_BC.view(torch.int32))
    assert one.ids.keys == other.ids.keys
    assert torch.equal(one.ids.values_N, other.ids.values_N)
    assert all(
        torch.equal(one.ids[name].lengths_B, other.ids[name].lengths_B) for name in one.ids.keys
    )


@pytest.mark.parametrize("name", ["word", "hashed", "number", "bucket", "list", "vector"])
@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_a_column_of_any_type_is_what_the_log_makes_of_it(kind: pa.DataType, name: str) -> None:
    """As a frame of candidates and as a column by itself; a value that the one refuses, the other
    refuses too.
    """
    transforms, tried = alone(name), 0
    encoder = Encoder(transforms)
    for column in column_of(kind):
        if name in ("list", "vector"):
            if pa.types.is_temporal(kind):
                continue  # lists of times are not read
            values = column.slice(2, 2) if name == "vector" else column.slice(0, 3)
            column = pa.ListArray.from_arrays([0, len(values), len(values)], values)
        kinds: list[Any] = [pa.chunked_array([column])]
        if name not in ("list", "vector"):
            kinds.append(pa.chunked_array([column.slice(0, 1), column.slice(1)]))
            if not (
                pa.types.is_boolean(kind)
                or pa.types.is_decimal(kind)
                or "view" in str(kind)
                or kind == pa.float16()
            ):
                kinds.append(pa.chunked_array([column.dictionary_encode()]))
        for values in kinds:
            table = pa.table({"c": values})
            try:
                (wanted,) = raw_batches(transforms, table, table.num_rows)
            except UserError:
                for rows in (table, {"c": values}):
                    with pytest.raises(UserError):
                        encoder.batch(rows)
                continue
            assert_same(encoder.batch(table), wanted)
            assert_same(encoder.batch({"c": values}), wanted)
            tried += 1
    assert tried or name != "hashed" or pa.types.is_temporal(kind), "all was refused"


# -- mistakes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["arrays", "series", "polars series", "pandas", "polars", "arrow"])
def test_columns_that_no_model_reads_may_be_of_any_type(
    form: str, scorer: Scorer, table: pa.Table
) -> None:
    """Also times of day and lists of structs, which are refused where a model reads them."""
    times = pa.array([datetime.time(10, i) for i in range(20)])
    wide = table.append_column("at", times).append_column(
        "each", pa.array([[{"a": i}] for i in range(20)])
    )
    assert np.abs(scorer.score(FORMS[form](wide)) - scorer.score(table)).max() <= CLOSE
    user, own = table.slice(0, 1).select(["x"]).to_pylist()[0], wide.drop_columns(["x"])
    assert np.abs(scorer.rank(user, FORMS[form](own)) - scorer.rank(user, own)).max() <= CLOSE


def test_what_is_a_frame() -> None:
    frames = [
        pa.table({"a": [1]}),
        pd.DataFrame({"a": [1]}),
        pl.DataFrame({"a": [1]}),
        None,
        3,
        "abc",
        b"abc",
    ]
    others = [[], (), {}, [{"a": 1}], iter([]), {"a": {}}.values(), np.array([{}])]
    assert all(map(is_frame, frames)) and not any(map(is_frame, others))


def test_mistakes(scorer: Scorer, table: pa.Table) -> None:
    user, rows = {"x": 1.0}, table.drop_columns(["x"]).to_pylist()
    takes = (
        "give a list of mappings, columns of values, a pandas or polars data frame, or an arrow"
        " table$"
    )
    for other in (None, 3, "abc"):
        kind = type(other).__name__
        with pytest.raises(UserError, match=f"frame: a builtins.{kind} cannot be read .*; {takes}"):
            scorer.score(other)
        with pytest.raises(UserError, match=f"frame: a builtins.{kind} cannot be read .*; {takes}"):
            scorer.rank(user, other)
        with pytest.raises(
            UserError, match=f"request 0: the user is {other!r}; give {{column: value}}, or a frame"
        ):
            scorer.rank(other, rows)
    with pytest.raises(
        UserError, match="request 0: a frame of 20 rows for one user; give one of one row"
    ):
        scorer.rank(table, rows)
    with pytest.raises(UserError, match="requests: None is no list; give"):
        scorer.rank_all(None)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"request 1: 5 is no pair; give \(user, candidates\)"):
        scorer.rank_all([(user, rows), 5])  # type: ignore[list-item]
    with pytest.raises(UserError, match="no column 'id' in the log"):
        scorer.score(table.drop_columns(["id"]))
    with pytest.raises(UserError, match="no column 'id' in the request"):
        scorer.rank(user, table.drop_columns(["id", "x"]))
    with pytest.raises(
        UserError, match=r"row 0: <pyarrow.lib.ChunkedArray .{1,100} is no object with columns"
    ) as told:
        scorer.score([table["id"]])
    assert "\n" not in str(told.value)
    assert scorer.rank_all([]) == [] and scorer.rank(user, []).shape == (0, 1)


@pytest.mark.parametrize("form", ["mappings", "lists", "pandas", "polars", "arrow"])
def test_a_column_of_both_sides_is_refused(form: str, scorer: Scorer, table: pa.Table) -> None:
    """Whatever the candidates are; a column that the model does not read may be anywhere."""
    user = {"x": 1.0, "clicked": 1}
    with pytest.raises(
        UserError, match="column 'x': both the user and the candidates have it; give it once"
    ):
        scorer.rank(user, FORMS[form](table))
    scorer.rank(user, FORMS[form](table.drop_columns(["x"])))
    last = table.drop_columns(["x"]).to_pylist()
    last[-1]["x"] = None
    with pytest.raises(UserError, match="column 'x': both"):
        scorer.rank(user, last)


@pytest.mark.parametrize("users", [("weighted",), ("w",), ("weighted", "w"), ("w", "x")])
def test_a_list_and_its_weights_may_be_on_two_sides(
    users: tuple[str, ...], scorer: Scorer, table: pa.Table
) -> None:
    rows = [
        row | {"weighted": [3, i % 7], "w": [0.5, float(i)]}
        for i, row in enumerate(table.to_pylist())
    ]
    user = {name: rows[4][name] for name in users}
    own = [{name: value for name, value in row.items() if name not in user} for row in rows]
    wanted = scorer.score([row | user for row in rows])
    columns = {name: [row[name] for row in own] for name in own[0]}
    for candidates in (own, columns, pa.table(columns)):
        assert np.abs(scorer.rank(user, candidates) - wanted).max() <= CLOSE
    if len(users) == 1:
        (name,) = users
        with pytest.raises(
            UserError, match=f"no column '{name}' in the request|row 0: no '{name}'; give None"
        ):
            scorer.rank({"x": 1.0}, [{n: v for n, v in row.items() if n != "x"} for row in own])
