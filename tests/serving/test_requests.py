from __future__ import annotations

import datetime
import math
import threading
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparrow.core import Batch, UserError
from sparrow.features.counts import Counted
from sparrow.features.encodings.range import Range
from sparrow.features.encodings.vocabulary import Vocabulary
from sparrow.features.hashing import hash_ids
from sparrow.features.rows import batches
from sparrow.features.schema import Column, Encoding, Schema
from sparrow.features.transforms import Transforms
from sparrow.kernels import missing
from sparrow.serving.frames import stack_requests
from sparrow.serving.requests import Encoder

needs_kernels = pytest.mark.skipif(bool(missing()), reason=missing())
KNOWN = [
    "a",
    "b",
    "ü",
    "12",
    "-7",
    "true",
    "x y",
    "",
    "a long text of more than eight bytes",
    *map(str, range(100)),
]


def made() -> Transforms:
    """Transforms with a column of every kind."""
    table = {"table": "words"}
    fitted = {"mean": 0.5, "std": 2.0, "low": -50.0, "high": 60.0}
    columns = {
        "label": Column(kind="label"),
        "word": Column(kind="categorical", **table),
        "known": Column(kind="categorical", table="words", missing=("?", "-1", "12.0", "true")),
        "hashed": Column(kind="categorical", table="hashes"),
        "number": Column(kind="categorical", table="range", source="n"),
        "bucket": Column(
            kind="categorical", table="buckets", quantiles=4, boundaries=(-1.5, 0.0, 3.25)
        ),
        "words": Column(kind="list", max_length=3, **table),
        "commas": Column(kind="list", separator=",", **table),
        "json": Column(kind="list", separator="json", table="hashes"),
        "numbers": Column(kind="list", table="range"),
        "weighted": Column(kind="list", weights="w", max_length=2, **table),
        "colons": Column(kind="list", weights=":", **table),
        "plain": Column(kind="numeric", transform="none"),
        "x": Column(kind="numeric", transform="standard", missing=("-1", "?"), **fitted),
        "x:missing": Column(kind="numeric", transform="missing"),
        "log": Column(kind="numeric", transform="log", **fitted),
        "log2": Column(
            kind="numeric", transform="log", source="x", missing=("-1", "?"), mean=1.0, std=0.25
        ),
        "seen": Column(
            kind="numeric", source="word", counts="seen", transform="log", mean=1.0, std=2.0
        ),
        "rate": Column(kind="numeric", source="word", counts="rate", prior=3.0, mean=0.5, std=0.25),
        "rate:missing": Column(kind="numeric", transform="missing"),
        "when": Column(kind="time"),
    }
    hashes = hash_ids(pa.array(KNOWN))
    words = Vocabulary(hashes, np.ones(len(hashes), np.int64))
    counts = np.where(np.arange(30) % 3 == 0, Range.KNOWN, 0).astype(np.int32)
    encodings = {
        "words": Encoding(kind="vocabulary", rows=words.rows, digest=words.digest, min_count=1),
        "hashes": Encoding(kind="hash", rows=64),
        "range": Encoding(kind="range", low=-5, high=24, rows=32, min_count=1),
        "buckets": Encoding(kind="range", low=0, high=3, rows=6),
    }
    counted = Counted.sum_by_hash(
        hashes, np.stack([np.arange(len(hashes)) + 1, np.arange(len(hashes)) // 2])
    )
    return Transforms(
        schema=Schema(columns=columns, encodings=encodings),
        vocabularies={"words": words, "range": Range(-5, counts)},
        counts={"seen": counted, "rate": counted},
    )


TRANSFORMS = made()
FAST, DEFINED = Encoder(TRANSFORMS), Encoder(TRANSFORMS, "reference")

words = st.sampled_from(
    [*KNOWN, "?", "-1", " a ", "A", "tr\u00e9s", "\u3000", "0x10", "1e3", "007", "12.0"]
)
words |= st.text(max_size=12).filter(lambda text: "\ud800" not in text and text.isprintable())
whole = st.integers(-120, 120) | st.integers(-(2**70), 2**70)
ids = (
    st.none()
    | words
    | whole
    | whole.map(lambda i: float(i) if abs(i) < 2**53 else 0.0)
    | st.just(math.nan)
)
integers = (
    st.none() | whole | st.sampled_from(["3", "-5", "24", "25", "99999999999999999999", "007"])
)
numbers = (
    st.none()
    | st.integers(-(10**6), 10**6)
    | st.floats(-1e30, 1e30)
    | st.booleans()
    | st.just(math.nan)
)
numbers |= st.sampled_from(
    ["", " 1.5 ", "-1", "?", "1e3", "nan", "-0", "-0.0", "\u00a02", "1e-400", ".5", "5."]
)
plain = numbers.filter(lambda value: value != "?")  # no column but x says what that is
loose = [" ", "a b", " 12\t a\x1cb ", "a,b, ,ü", "x\u2003y", "a  a", ",", "a", "\u2003"]
lists = st.none() | st.lists(ids.filter(lambda v: v != ""), max_size=6) | st.sampled_from(loose)
ROW = {
    "word": ids | st.booleans(),
    "known": ids | st.booleans(),
    "hashed": ids | st.booleans(),
    "n": integers,
    "bucket": plain,
    "words": lists,
    "commas": lists,
    "json": (
        lists.filter(lambda v: not isinstance(v, str))
        | st.sampled_from(['["a", 1]', "[]", "[1, null, 2]"])
    ),
    "numbers": st.none() | st.lists(integers, max_size=5),
    "colons": st.sampled_from([None, "a:1 b:0.5", "ü:2"]),
    "plain": plain,
    "x": numbers,
    "log": plain,
}
weights = (
    st.floats(-9, 9) | st.integers(-9, 9) | st.sampled_from([2**53 + 1, -(2**53) - 3, 2**63, 2**70])
)
pairs = st.lists(st.tuples(ids.filter(lambda v: v != ""), weights), max_size=4)
rows_of = st.fixed_dictionaries(ROW | {"weighted": st.none() | pairs}).map(
    lambda row: (
        row
        | {
            "w": [w for _, w in row["weighted"] or ()],
            "weighted": [i for i, _ in row["weighted"] or ()],
        }
    )
)


def assert_same(one: Batch, other: Batch) -> None:
    assert torch.equal(one.dense_BC.view(torch.int32), other.dense_BC.view(torch.int32))
    assert (
        one.ids.keys == other.ids.keys
        and one.ids.rows == other.ids.rows
        and one.ids.bounds == other.ids.bounds
    )
    for name in ("values_N", "offsets", "lengths", "weights_N"):
        ours, theirs = getattr(one.ids, name), getattr(other.ids, name)
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs), name
    assert one.ids.inverse_B.keys() == other.ids.inverse_B.keys()


@needs_kernels
@settings(max_examples=60, suppress_health_check=list(HealthCheck), deadline=None)
@given(st.lists(rows_of, max_size=5))
def test_compiled_is_what_the_transforms_make(rows: list[dict[str, Any]]) -> None:
    found = FAST.batch(rows)
    assert_same(found, DEFINED.batch(rows))
    assert_same(found, FAST.batch({name: [row[name] for row in rows] for name in FAST.sources}))
    for i, row in enumerate(rows):  # alone it is what it is beside others
        alone, beside = FAST.batch([row]), found.part(i, i + 1)
        assert torch.equal(alone.dense_BC, beside.dense_BC) and torch.equal(
            alone.ids.lengths, beside.ids.lengths
        )  # type: ignore[arg-type]
        assert torch.equal(alone.ids.values_N, beside.ids.values_N)


@pytest.mark.parametrize(
    "encoder", [pytest.param(FAST, marks=needs_kernels), DEFINED], ids=["compiled", "defined"]
)
def test_white_space_around_an_id_is_no_part_of_it(encoder: Encoder) -> None:
    none = dict.fromkeys(FAST.sources)
    padded, bare = (
        {"word": " a\t", "n": " 3", "words": ["b ", "12"]},
        {"word": "a", "n": "3", "words": ["b", 12]},
    )
    assert_same(encoder.batch([none | padded]), encoder.batch([none | bare]))
    assert_same(encoder.batch([none | {"word": " \x1c"}]), encoder.batch([none | {"word": ""}]))


@pytest.mark.parametrize(
    "encoder", [pytest.param(FAST, marks=needs_kernels), DEFINED], ids=["compiled", "defined"]
)
def test_weights_of_several_types(encoder: Encoder) -> None:
    """Integers beside floats are floats, as wide as they may be; what is no number is refused, with
    its place.
    """
    row = dict.fromkeys(FAST.sources) | {"weighted": ["a", "b"]}
    for w in ([0.5, 2**53 + 1], [2**53 + 3, 0.5], [0.5, 2**70], [2**70, 2**53 + 1]):
        found = encoder.batch([row | {"w": w}]).ids["weighted"].weights_N
        assert (
            found is not None
            and found.tolist() == np.array(w, np.float64).astype(np.float32).tolist()
        )
    for w in ([0.5, True], [True, 1], ["1", 0.5], [0.5, 10**400]):
        with pytest.raises(
            UserError, match=r"column 'w', row 1: \[.* are no weights; give each id one number"
        ):
            encoder.batch([row | {"w": [1, 2]}, row | {"w": w}])
    with pytest.raises(
        UserError,
        match=r"column 'weighted', row 1: 0.5 is not an id; write ids as integers or strings",
    ):
        encoder.batch([row | {"w": [1, 2]}, row | {"w": [1, 2], "weighted": [0.5, True]}])


def columns_of(rows: list[dict[str, Any]]) -> pa.Table:
    return pa.table({name: pa.array([row[name] for row in rows]) for name in FAST.sources})


@pytest.mark.parametrize(
    "encoder", [pytest.param(FAST, marks=needs_kernels), DEFINED], ids=["compiled", "defined"]
)
def test_it_is_what_a_log_of_these_columns_becomes(encoder: Encoder) -> None:
    """Columns of one type, as a log has them."""
    texts = ["a", "zzz", "12", "ü", "?", "true", "", None]
    count = len(texts)
    rows = [
        {
            "word": texts[i],
            "known": [12, -1, 7, 3, None, 0, 1, 2][i],
            "hashed": [1.0, 2.0, math.nan, -3.0, 0.0, 5.0, None, 2.0**53][i],
            "n": ["-5", "-4", "1", "007", "24", "25", None, "99999999999999999999"][i],
            "bucket": [-1.5, -1.4, 0.0, 3.25, 3.3, None, math.nan, 1e30][i],
            "words": [
                ["a", "b", None, "ü", "12"],
                None,
                [],
                ["a"],
                ["?"],
                ["b"] * 5,
                [None],
                ["true"],
            ][i],
            "commas": ["a, b", None, "", " ,", "ü", "a,,b", "b,", "x y,a"][i],
            "json": ['["a"]', "[]", None, "[1, 2]", '["a,b"]', "[null]", '[""]', "['a']"][i],
            "numbers": [[-5, 1], None, [], [24, 25, None], [7], [0], [4], [2**40]][i],
            "weighted": [["a", "b", "12"], [], ["ü"], ["a", None], ["q"], [], ["b"], ["a"]][i],
            "w": [[0.5, 1.0, 2.0], [], [3.0], [1.0, 9.0], [0.1], [], [-1.0], [1e-3]][i],
            "colons": ["a:1 b:2.5", None, "", "ü:0", "a:1", "b:1", "c:1", "12:7"][i],
            "plain": [1, 2, None, 4, 5, 6, 7, -8][i],
            "x": ["1.5", " -1 ", "?", None, "", "1e5", "-1e5", "nan"][i],
            "log": [True, False, None, True, True, True, False, False][i],
        }
        for i in range(count)
    ]
    (expected,) = batches(
        TRANSFORMS.schema, TRANSFORMS.transform(columns_of(rows), training=False), count
    )
    assert_same(encoder.batch(rows), expected)
    arrays = {name: np.array([row[name] for row in rows], object) for name in encoder.sources}
    assert_same(encoder.batch(arrays), expected)


def test_no_rows_and_the_columns_that_are_asked_for() -> None:
    for encoder in (FAST, DEFINED):
        assert (
            encoder.batch([]).batch_size
            == encoder.batch({name: [] for name in encoder.sources}).batch_size
            == 0
        )
        assert set(encoder.sources) == {*ROW, "weighted", "w"}
    assert DEFINED.by_definition == (*TRANSFORMS.schema.sparse, *TRANSFORMS.schema.dense)
    if not missing():
        assert FAST.by_definition == ("colons",)


ONE: dict[str, Any] = {
    "word": "a",
    "known": 12,
    "hashed": "h",
    "n": 1,
    "bucket": 1.0,
    "words": ["a"],
    "commas": "a,b",
}
ONE |= {
    "json": [1],
    "numbers": [1, 4],
    "weighted": ["a"],
    "w": [0.5],
    "colons": "a:1",
    "plain": 1,
    "x": 2.5,
    "log": 3,
}


@pytest.mark.parametrize(
    "user", [("word", "words", "x"), ("weighted", "w", "colons", "json"), ("x", "log"), ()]
)
def test_a_user_is_stored_once(user: tuple[str, ...]) -> None:
    """Crossed rows, expanded, are the rows written out; two users are stacked, and one has no
    candidate.
    """
    users = [{name: ONE[name] for name in user}, {name: ROW_TWO[name] for name in user}]
    which = np.array([0, 0, 1, 0, 1])
    rows = [
        {name: (ONE, ROW_TWO)[i % 2][name] for name in FAST.sources if name not in user}
        for i in range(5)
    ]
    whole = [row | users[u] for row, u in zip(rows, which, strict=True)]
    for encoder in (FAST, DEFINED):
        found, expected = encoder.crossed(users, rows, which), encoder.batch(whole)
        stored = {
            found.ids.stored(key)
            for key in found.ids.keys
            if TRANSFORMS.schema.columns[key].source in user
        }
        assert stored <= {2}
        assert torch.equal(found.dense_BC, expected.dense_BC)
        flat = found.ids.expanded()
        assert torch.equal(flat.values_N, expected.ids.values_N) and torch.equal(
            flat.offsets, expected.ids.offsets
        )  # type: ignore[arg-type]
        assert flat.weights_N is not None and torch.equal(flat.weights_N, expected.ids.weights_N)  # type: ignore[arg-type]


ROW_TWO: dict[str, Any] = dict.fromkeys(ONE) | {
    "weighted": [],
    "w": [],
    "words": "b b a 12",
    "x": "7",
}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"word": {"a": 1}},
            "column 'word', row 2: {'a': 1} is no value; give a number, text, a time, a list",
        ),
        ({"word": 1.5}, "column 'word', row 2: 1.5 .* is not an id"),
        ({"word": ["a"]}, "column 'word', row 2: .* is not an id"),
        ({"words": 7}, "column 'words', row 2: 7 is no list of ids; give a list of ids, or null$"),
        ({"n": "a"}, "column 'n', row 2: 'a' is no integer; give an integer, or null$"),
        ({"x": "much"}, "column 'x', row 2: 'much' is no number; give a number, or null$"),
        (
            {"plain": math.inf},
            "column 'plain', row 2: inf is infinite in float32; give a number, or null$",
        ),
        ({"log": 1e39}, "column 'log', row 2: 1e.39 is infinite in float32"),
        (
            {"w": [1.0, 2.0]},
            "column 'weighted', row 2: 1 ids and 2 weights; give each id one weight",
        ),
        ({"w": [math.nan]}, "column 'weighted', row 2: weight nan is not a finite number"),
        ({"json": "[1"}, "column 'json', row 2: '\\[1' is no flat JSON array"),
        ({"bucket": [1]}, "column 'bucket', row 2: \\[1\\] is no number; give a number, or null$"),
        ({"word": "\ud800"}, "column 'word', row 2: '.*' is no text in UTF-8"),
        ({"x": "\ud800"}, "column 'x', row 2: '.*' is no text in UTF-8"),
        ({"words": ["a", "\ud800"]}, "column 'words', row 2: '.*' is no text in UTF-8"),
        ({"words": [b"\xff", "a"]}, "is no text in UTF-8 and stands beside text"),
    ],
)
def test_mistakes_are_told_with_column_and_row(change: dict[str, Any], says: str) -> None:
    for encoder in (FAST, DEFINED):
        with pytest.raises(UserError, match=says):
            encoder.batch([ONE, ROW_TWO, ONE | change, ONE])


def test_mistakes_of_a_request() -> None:
    without = {name: value for name, value in ONE.items() if name != "word"}
    for encoder in (FAST, DEFINED):
        with pytest.raises(UserError, match="row 1: no 'word'; give None"):
            encoder.batch([ONE, without])
        with pytest.raises(
            UserError, match="no column 'word' in the request; did you mean 'words'"
        ):
            encoder.batch({name: [value] for name, value in without.items()})
        with pytest.raises(UserError, match="column 'x': 1 values where 'word' has 2"):
            encoder.batch({name: [value] * (1 + (name != "x")) for name, value in ONE.items()})
        with pytest.raises(UserError, match="row 1: 7 is no object with columns"):
            encoder.batch([ONE, 7])  # type: ignore[list-item]
        with pytest.raises(UserError, match="column 'word': .* is not a list; write rows as"):
            encoder.batch(ONE)
        with pytest.raises(UserError, match="candidates: 1 where users are named for 2"):
            encoder.crossed([{"word": 1}], [without], np.zeros(2, np.int64))


@needs_kernels
def test_threads_share_an_encoder() -> None:
    rows = [ONE, ROW_TWO] * 50
    expected = DEFINED.batch(rows)
    failed: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(20):
                assert_same(FAST.batch(rows), expected)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


@needs_kernels
@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 5000])
def test_vocabularies_of_any_size(count: int, tmp_path: Path) -> None:
    """Every known id is found, and no other, also where hashes begin with the same bits."""
    some = hash_ids(pa.array(np.arange(count // 2)))
    hashes = np.unique(np.concatenate([some, np.arange(1, count - count // 2 + 1)]))
    hashes = np.random.default_rng(0).permutation(hashes)
    known = Vocabulary(hashes, np.ones(len(hashes), np.int64))
    encodings = {"t": Encoding(kind="vocabulary", rows=known.rows, digest=known.digest)}
    schema = Schema(columns={"id": Column(kind="categorical", table="t")}, encodings=encodings)
    found = Encoder(Transforms(schema=schema, vocabularies={"t": known})).batch(
        {"id": [*range(count + 5), None]}
    )
    asked = np.append(hash_ids(pa.array(np.arange(count + 5))), 0)
    assert torch.equal(found.ids.values_N, torch.from_numpy(known.rows_of(asked)))


def test_columns_of_several_requests_stay_columns() -> None:
    one, other = {"a": [1, 2], "b": ["x", None]}, {"a": [], "b": []}
    assert stack_requests([one, other, one]) == (
        {"a": [1, 2, 1, 2], "b": ["x", None, "x", None]},
        [2, 0, 2],
    )
    rows, counts = stack_requests([one, {"a": [3], "c": [0]}, [{"a": 4}]])
    assert rows == [
        {"a": 1, "b": "x"},
        {"a": 2, "b": None},
        {"a": 3, "c": 0},
        {"a": 4},
    ] and counts == [2, 1, 1]


def clock(format: str | None = None, **more: Column) -> Transforms:
    """Transforms of the hours and weekdays of `ts`."""
    columns = {
        part: Column(kind="categorical", source="ts", part=part, table=part, format=format)
        for part in ("hour", "weekday")
    }
    ends = {"hour": (0, 23), "weekday": (0, 6)}
    tables = {
        name: Encoding(
            kind="range", min_count=2, low=low, high=high, rows=high - low + 3, distinct=high + 1
        )
        for name, (low, high) in ends.items()
    }
    known = {
        name: Range(0, np.full(high + 1, Range.KNOWN, np.int32)) for name, (_, high) in ends.items()
    }
    return Transforms(schema=Schema(columns=columns | more, encodings=tables), vocabularies=known)


NOON = datetime.datetime(2026, 3, 4, 12, 30, 5)  # a Wednesday
EAST = datetime.timezone(datetime.timedelta(hours=5, minutes=30))


@pytest.mark.parametrize("format", [None, "%s", "%d.%m.%Y %H:%M:%S", "%Y%m%d%H", "%y%m%d%H"])
@pytest.mark.parametrize(
    "value",
    [
        NOON,
        NOON.replace(tzinfo=datetime.UTC),
        (NOON + datetime.timedelta(hours=5, minutes=30)).replace(tzinfo=EAST),
        "2026-03-04T12:30:05",
        "2026-03-04 12:30:05.25",
        "2026-03-04T18:00:05+05:30",
        "2026-03-04T12:30:05Z",
        *(np.datetime64("2026-03-04T12:30:05", unit) for unit in ("s", "ms", "us", "ns")),
    ],
    ids=repr,
)
def test_a_time_is_what_it_is_in_a_frame(value: Any, format: str | None) -> None:
    """However a request writes it, and however the log did."""
    transforms = clock(format)
    frame = transforms.transform(pa.table({"ts": [NOON]}), training=False).to_pydict()
    assert frame == {"hour": [12 + 2], "weekday": [2 + 2]}
    for rows in ([{"ts": value}, {"ts": None}], {"ts": [value, None]}):
        batch = Encoder(transforms).batch(rows)
        assert {name: batch.ids[name].values_N.tolist() for name in frame} == {
            n: [v[0], 0] for n, v in frame.items()
        }


@pytest.mark.parametrize("unit", [1, 10**3, 10**6, 10**9])
def test_integers_tell_their_unit(unit: int) -> None:
    seconds = int(NOON.replace(tzinfo=datetime.UTC).timestamp())
    batch = Encoder(clock()).batch([{"ts": seconds * unit}])
    assert [batch.ids[name].values_N.tolist() for name in ("hour", "weekday")] == [[14], [4]]


def test_pandas_times_dates_and_columns_of_times() -> None:
    """NaT is a missing time; a date is its midnight; early times are not taken for another unit."""
    pandas = pytest.importorskip("pandas")
    times = [
        NOON,
        None,
        datetime.datetime(1970, 1, 1, 1),
        datetime.datetime(1969, 12, 31, 23, 59, 59, 999999),
    ]
    series = pandas.Series(pandas.to_datetime(times)).astype("M8[ns]")
    want = (
        clock()
        .transform(pa.table({"ts": pa.array(times, pa.timestamp("us"))}), training=False)["hour"]
        .to_pylist()
    )
    assert want == [14, 0, 3, 25]
    for column in (series, list(series), series.to_numpy(), times):
        assert Encoder(clock()).batch({"ts": column}).ids["hour"].values_N.tolist() == want
    milliseconds = series.to_numpy().astype("M8[ms]")
    assert Encoder(clock()).batch({"ts": milliseconds}).ids["hour"].values_N.tolist() == want
    aware = pandas.Timestamp("2026-03-04 07:30:05", tz="America/New_York")
    assert Encoder(clock()).batch([{"ts": aware}]).ids["hour"].values_N.tolist() == [14]
    for day in (datetime.date(2026, 3, 4), np.datetime64("2026-03-04")):
        assert Encoder(clock()).batch([{"ts": day}]).ids["hour"].values_N.tolist() == [2]


@pytest.mark.parametrize("value", ["noon", "2026-13-01", [1], {"a": 1}, 0.5])
def test_a_mistake_names_the_column_that_was_sent(value: Any) -> None:
    with pytest.raises(UserError, match="column 'ts', row 1:") as caught:
        Encoder(clock()).batch([{"ts": NOON}, {"ts": value}])
    assert "hour" not in str(caught.value) and "weekday" not in str(caught.value)


def test_a_time_in_the_place_of_an_id_or_a_number_is_refused() -> None:
    columns = {
        "user": Column(kind="categorical", table="hour"),
        "x": Column(kind="numeric", transform="none"),
    }
    encoder = Encoder(clock(**columns))
    for name, what in (("user", "is not an id"), ("x", "is no number")):
        row = {"ts": NOON, "user": 3, "x": 1.0} | {name: NOON}
        with pytest.raises(UserError, match=rf"column {name!r}, row 0: .* {what}"):
            encoder.batch([row])


@pytest.mark.parametrize(
    ("column", "decimals", "others"),
    [
        ("word", ["12", "12.00", "NaN", "-7"], [12, 12, None, -7]),
        ("hashed", ["1E+80", "9223372036854775808"], ["1" + 80 * "0", "9223372036854775808"]),
        ("plain", ["9.99", "1E-90", "1E+30", "NaN", "0E-100"], [9.99, 1e-90, 1e30, None, 0]),
        ("bucket", ["-1.50", "3.25", "3.2500000000001"], [-1.5, 3.25, 3.2500000000001]),
        ("words", [["12", "-7.0", "NaN"], ["12"], []], [[12, -7], [12], []]),
        ("numbers", [["3", "24.00"]], [[3, 24]]),
    ],
)
def test_decimals_are_the_numbers_and_ids_that_they_are(
    column: str, decimals: list[Any], others: list[Any]
) -> None:
    row = dict.fromkeys(FAST.sources)
    given = [
        [Decimal(x) for x in value] if isinstance(value, list) else Decimal(value)
        for value in decimals
    ]
    for values in (given, [*given, None]):
        batch = FAST.batch([row | {column: value} for value in values])
        assert_same(
            batch, FAST.batch([row | {column: value} for value in [*others, None][: len(values)]])
        )


@pytest.mark.parametrize("value", [Decimal("Infinity"), [Decimal(1), Decimal("-Infinity")]])
def test_an_infinite_decimal_is_no_value(value: Any) -> None:
    with pytest.raises(UserError, match="column 'words', row 0: .*Infinity.* is no value"):
        FAST.batch([dict.fromkeys(FAST.sources) | {"words": value}])


def test_times_in_a_cross_are_iso_8601_too_where_the_log_writes_them_otherwise() -> None:
    columns = {
        "day": Column(
            kind="categorical", table="day", source="when", part="weekday", format="%d.%m.%Y"
        ),
        "cross": Column(kind="categorical", table="cross", cross=("day", "item")),
        "item": Column(kind="categorical", table="item"),
    }
    hashes = Encoding(kind="hash", rows=64)
    encodings = {"cross": hashes, "item": hashes, "day": hashes}
    encoder = Encoder(Transforms(schema=Schema(columns=columns, encodings=encodings)))
    ways = ["21.11.2026", "2026-11-21", "2026-11-21T00:00:00Z", datetime.date(2026, 11, 21)]
    ids = [encoder.batch([{"when": when, "item": "a"}]).ids.values_N.tolist() for when in ways]
    assert len(ids[0]) == 3 and ids == 4 * ids[:1]
