"""One cell, one meaning: the same rows as CSV, Parquet, a data frame and a request are the same
features to the bit.
"""

from __future__ import annotations

import csv
import decimal
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from sparrow import data
from sparrow.core import Batch, UserError
from sparrow.data.logs.frames import as_table
from sparrow.data.logs.read import Log, open_like
from sparrow.data.logs.tables import table_log
from sparrow.data.logs.text_types import types_for
from sparrow.data.preparation.job import prepare
from sparrow.features.rows import batches
from sparrow.features.schema import WORDS, Column, Encoding, Schema, Source, Split
from sparrow.features.transforms import Transforms
from sparrow.kernels import missing
from sparrow.serving.requests import Encoder
from sparrow.serving.values import seconds_of_values

pd, pl = pytest.importorskip("pandas"), pytest.importorskip("polars")

YES_NO = ("true", "True", "TRUE", "false", "False", "FALSE")
WRITTEN = (
    "5",
    "5.0",
    "-7",
    "-7.00",
    "0",
    "-0.0",
    "007",
    "1e5",
    "100000",
    "1E5",
    "+5",
    "5.50",
    "0x10",
    "nan5",
    "a",
    "ü",
)
HUGE = "12345678901234567890"
IDS = (
    *WORDS,
    " NA ",
    "\tNone",
    *YES_NO,
    *WRITTEN,
    " a",
    "na",
    "n/a",
    "<NA>",
    "NA NA",
    "\u00a0NA",
    HUGE,
    f"{HUGE}.0",
)
NUMBERS = (
    *WORDS,
    " NA ",
    *YES_NO,
    "5",
    " 5.0",
    "1e5",
    "-0.0",
    "007",
    ".5",
    "5.",
    "1e-400",
    "-999",
    "-999.0",
    "2.25",
)
WHOLE = (*WORDS, " NA", "5", "5.0", "007", "-3", "-3.000", " 9 ", "11")
N = 3 * 43

COLUMNS = {
    "click": (Column(kind="label"), ("0", "1", "True", "false", "1.0", " 0 ", "FALSE")),
    "late": (Column(kind="label"), ("0", "1", "NA", "", "TRUE")),
    "yes": (Column(kind="label", positive="True"), ("true", "TRUE", "False", "True")),
    "w": (Column(kind="weight"), ("1", "2.0", "True", "0.5")),
    "g": (Column(kind="group"), IDS),
    "x": (Column(kind="numeric", transform="standard"), NUMBERS),
    "m": (Column(kind="numeric", transform="none", missing=("-999", "True")), NUMBERS),
    "q": (Column(kind="categorical", table="q", quantiles=4), NUMBERS),
    "word": (Column(kind="categorical", table="word"), IDS),
    "kept": (Column(kind="categorical", table="word", present=("NA", "None")), IDS),
    "odd": (Column(kind="categorical", table="word", missing=("5.0", "TRUE", "a")), IDS),
    "hashed": (Column(kind="categorical", table="hashed"), IDS),
    "whole": (Column(kind="categorical", table="whole"), WHOLE),
    "seen": (Column(kind="numeric", source="word", counts="seen"), ()),
    "cross": (Column(kind="categorical", table="cross", cross=("word", "whole")), ()),
    "bar": (
        Column(kind="list", table="word", separator="|"),
        (*IDS, "NA|5.0|True", "a||NA", "|", "5|5.0| a "),
    ),
    "white": (
        Column(kind="list", table="hashed"),
        ("NA 5.0 True", "", "None", "a  b NULL", "x\ty"),
    ),
    "json": (
        Column(kind="list", table="word", separator="json", present=("NA",)),
        ('["NA", "5.0", 5, true, null]', "[]", "", "NA", "[nan, 1]", '["a,b", "None"]'),
    ),
    "weighed": (
        Column(kind="list", table="word", weights=":"),
        ("a:1 NA:2 5.0:0.5", "None:3", "", "NA"),
    ),
    "beside": (
        Column(kind="list", table="word", separator="|", weights="of_beside"),
        ("a|NA|5.0", "NULL", ""),
    ),
    "of_beside": (Column(kind="ignore"), ("1|2|0.5", "None", "NA")),
    "v": (Column(kind="vector", size=2, separator=","), ("[0.5,2]", "NA", "", "1e1,-3", "None")),
}
ENCODINGS = {
    "q": Encoding(),
    "word": Encoding(kind="vocabulary", min_count=1),
    "hashed": Encoding(kind="hash", rows=64),
    "whole": Encoding(kind="range", min_count=1),
    "cross": Encoding(min_count=1),
}
SCHEMA = Schema(
    columns={name: column for name, (column, _) in COLUMNS.items()}, encodings=ENCODINGS
)
TEXTS = {name: list(islice(cycle(texts), N)) for name, (_, texts) in COLUMNS.items() if texts}
Door = Callable[[Path, dict[str, list[str]], Schema], Log]


def write_csv(folder: Path, texts: dict[str, list[str]]) -> Path:
    with open(folder / "log.csv", "w", newline="", encoding="utf-8") as file:
        csv.writer(file, quoting=csv.QUOTE_ALL).writerows(
            [list(texts), *zip(*texts.values(), strict=True)]
        )
    return folder / "log.csv"


def as_csv(folder: Path, texts: dict[str, list[str]], schema: Schema) -> Log:
    return open_like([write_csv(folder, texts)], schema.source, schema)


def as_parquet(kind: pa.DataType) -> Door:
    def opened(folder: Path, texts: dict[str, list[str]], schema: Schema) -> Log:
        table = pa.table({name: pa.array(values).cast(kind) for name, values in texts.items()})
        pq.write_table(table, folder / "log.parquet")
        return open_like([folder / "log.parquet"], schema.source, schema)

    return opened


def as_frame(frame: Callable[[dict[str, list[str]]], Any]) -> Door:
    def opened(folder: Path, texts: dict[str, list[str]], schema: Schema) -> Log:
        return table_log(as_table(frame(texts)), schema.source)

    return opened


def arrays(kind: pa.DataType) -> Callable[[dict[str, list[str]]], pa.Table]:
    return lambda texts: pa.table(
        {name: pa.array(values).cast(kind) for name, values in texts.items()}
    )


def runs(texts: dict[str, list[str]]) -> pa.Table:
    return pa.table(
        {name: pa.compute.run_end_encode(pa.array(values)) for name, values in texts.items()}
    )


CODED = pa.dictionary(pa.int32(), pa.string(), ordered=True)
DOORS: dict[str, Door] = {
    "csv": as_csv,
    "parquet": as_parquet(pa.string()),
    "parquet large": as_parquet(pa.large_string()),
    "parquet coded": as_parquet(pa.dictionary(pa.int32(), pa.string())),
    "pandas": as_frame(pd.DataFrame),
    "pandas objects": as_frame(lambda texts: pd.DataFrame(texts, dtype=object)),
    "pandas category": as_frame(lambda texts: pd.DataFrame(texts).astype("category")),
    "polars": as_frame(pl.DataFrame),
    "polars enum": as_frame(
        lambda texts: pl.DataFrame(
            {
                name: pl.Series(values, dtype=pl.Enum(sorted(set(values))))
                for name, values in texts.items()
            }
        )
    ),
    "arrow views": as_frame(arrays(pa.string_view())),
    "arrow ordered": as_frame(
        lambda texts: pa.table({n: pa.array(v).cast(CODED) for n, v in texts.items()})
    ),
    "arrow runs": as_frame(runs),
}


def rows_of(log: Log, schema: Schema) -> pa.Table:
    return pa.Table.from_batches(list(log.batches(types_for(schema, log))))


def batch_of(log: Log, transforms: Transforms, *, training: bool = True) -> Batch:
    table = transforms.transform(rows_of(log, transforms.schema), training=training)
    return next(iter(batches(transforms.schema, table, table.num_rows)))


def assert_same(one: Batch, other: Batch, *, with_roles: bool = True) -> None:
    for feature, values in zip(("dense",), (one.dense_BC,), strict=True):
        assert torch.equal(values.view(torch.int32), other.dense_BC.view(torch.int32)), feature
    for key in one.ids.keys:
        ours, theirs = one.ids[key].expanded(), other.ids[key].expanded()
        assert ours.values_N.tolist() == theirs.values_N.tolist(), key
        assert ours.lengths_B.tolist() == theirs.lengths_B.tolist(), key
    ours, theirs = one.ids.weights_N, other.ids.weights_N
    if ours is None or theirs is None:
        assert ours is theirs
    else:
        assert torch.equal(ours.view(torch.int32), theirs.view(torch.int32))
    for role in ("labels_BT", "weights_B", "session_B") if with_roles else ():
        ours, theirs = getattr(one, role), getattr(other, role)
        if ours is None:
            assert theirs is None, role
            continue
        assert torch.equal(ours.nan_to_num(-1), theirs.nan_to_num(-1)), role


@pytest.fixture(scope="module", params=["csv", "parquet", "polars"])
def fitted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Transforms:
    """Transforms that were fitted on the rows as one door gives them."""
    folder = tmp_path_factory.mktemp(request.param)
    schema = replace(SCHEMA, source=Source(cells=2))
    log: Any = DOORS[request.param](folder, TEXTS, schema)
    log = log if not log.files else [log.files[0].name]
    prepare(log, folder / "out", schema=SCHEMA, split=Split(valid=0, test=0))
    return Transforms.load(folder / "out")


def test_texts_are_the_same_rows_through_every_door(fitted: Transforms, tmp_path: Path) -> None:
    wanted = batch_of(as_csv(tmp_path, TEXTS, fitted.schema), fitted)
    assert (
        len(set(wanted.ids["word"].values_N.tolist())) > 15
        and (wanted.ids["word"].values_N == 1).sum() == 0
    )
    for door, opened in DOORS.items():
        try:
            assert_same(wanted, batch_of(opened(tmp_path, TEXTS, fitted.schema), fitted))
        except (AssertionError, UserError) as error:
            raise AssertionError(f"{door}: {error}") from error


@pytest.mark.parametrize(
    "impl",
    [
        pytest.param("auto", marks=pytest.mark.skipif(bool(missing()), reason=missing())),
        "reference",
    ],
)
def test_a_request_is_the_row_of_a_log(fitted: Transforms, tmp_path: Path, impl: Any) -> None:
    wanted = batch_of(as_csv(tmp_path, TEXTS, fitted.schema), fitted)
    encoder = Encoder(fitted, impl)
    assert_same(
        wanted, encoder.batch({name: TEXTS[name] for name in encoder.sources}), with_roles=False
    )
    rows = [{name: TEXTS[name][i] for name in encoder.sources} for i in range(N)]
    assert_same(wanted, encoder.batch(rows), with_roles=False)
    for i in range(0, N, 7):
        alone = encoder.batch(rows[i : i + 1])
        assert torch.equal(alone.dense_BC, wanted.dense_BC[i : i + 1])
        for key in alone.ids.keys:
            ids = wanted.ids[key]
            low, high = ids.offsets_B1[i : i + 2].tolist()
            assert alone.ids[key].values_N.tolist() == ids.values_N[low:high].tolist(), (
                key,
                rows[i],
            )


TYPED = [
    *(pa.int8(), pa.int32(), pa.int64(), pa.float16(), pa.float32(), pa.float64()),
    *(pa.decimal32(9, 0), pa.decimal64(9, 2), pa.decimal128(20, 2), pa.decimal256(60, 3)),
    *(pa.string(), pa.string_view(), pa.binary(), pa.large_binary(), pa.binary_view()),
]


@pytest.mark.parametrize("name", ["word", "whole", "hashed", "x", "bar"])
def test_a_number_is_the_same_in_every_type(fitted: Transforms, name: str) -> None:
    for kind in TYPED:
        check_type(fitted, name, kind)


def check_type(fitted: Transforms, name: str, kind: pa.DataType) -> None:
    values = [5, None, -3, 9, 11]
    as_text = pa.array([None if v is None else str(v) for v in values])
    is_text = (
        pa.types.is_string(kind)
        or pa.types.is_binary(kind)
        or kind in (pa.large_binary(), pa.string_view())
    )
    made: Any = as_text.cast(kind) if is_text or kind == pa.binary_view() else None
    if made is None:
        number = (
            decimal.Decimal
            if pa.types.is_decimal(kind)
            else float
            if pa.types.is_floating(kind)
            else int
        )
        made = pa.array([None if v is None else number(v) for v in values], kind)
    if name == "bar":
        made = pa.array([[v] for v in made.to_pylist()], pa.list_(kind))
    alone = columns_alone(fitted, name)
    log = table_log(pa.table({name: made}), alone.schema.source)
    wanted = alone.transform(pa.table({name: as_text}), training=False)
    assert alone.transform(rows_of(log, alone.schema), training=False).equals(wanted)
    assert alone.transform(pa.table({name: made}), training=False).equals(wanted)
    if "decimal" not in str(kind):  # no JSON says such
        encoded = Encoder(alone).batch({name: made.to_pylist()})
        (batch,) = batches(alone.schema, wanted, 5)
        assert torch.equal(encoded.dense_BC, batch.dense_BC)
        assert encoded.ids.values_N.tolist() == batch.ids.values_N.tolist()


@pytest.mark.parametrize("name", ["word", "hashed", "x", "kept"])
def test_yes_and_no_are_the_same_as_text_and_as_such(fitted: Transforms, name: str) -> None:
    alone, texts = columns_alone(fitted, name), ["True", "FALSE", None, "true"]
    wanted = alone.transform(pa.table({name: texts}), training=False)
    assert alone.transform(pa.table({name: [True, False, None, True]}), training=False).equals(
        wanted
    )
    frame = as_table(pd.DataFrame({name: pd.array([True, False, None, True], "boolean")}))
    assert alone.transform(frame, training=False).equals(wanted)
    (batch,) = batches(alone.schema, wanted, 4)
    for values in ([True, False, None, True], texts):
        encoded = Encoder(alone).batch({name: values})
        assert encoded.ids.values_N.tolist() == batch.ids.values_N.tolist()
        assert torch.equal(encoded.dense_BC, batch.dense_BC)


def test_ids_that_pandas_made_floats_are_the_ids(fitted: Transforms, tmp_path: Path) -> None:
    """One missing value makes 5.0 of 5, in the frame and in its CSV; Int64 keeps it."""
    values = [5, None, -3, 9]
    frames = [
        pd.DataFrame({"whole": pd.array(values, "Int64")}),
        pd.DataFrame({"whole": [*map(float_of, values)]}),
    ]
    alone = columns_alone(fitted, "whole")
    wanted = alone.transform(pa.table({"whole": values}), training=False)
    for frame in frames:
        assert alone.transform(as_table(frame), training=False).equals(wanted)
        frame.to_csv(tmp_path / "log.csv", index=False)
        log = open_like([tmp_path / "log.csv"], alone.schema.source, alone.schema)
        assert alone.transform(rows_of(log, alone.schema), training=False).equals(wanted)


def float_of(value: int | None) -> float:
    return np.nan if value is None else float(value)


def columns_alone(fitted: Transforms, *names: str) -> Transforms:
    columns = {name: fitted.schema.columns[name] for name in names}
    return replace(fitted, schema=replace(fitted.schema, columns=columns, groups={}, cluster=None))


def test_a_log_of_before_keeps_its_rule(fitted: Transforms, tmp_path: Path) -> None:
    """Without `cells` in its schema, CSV alone has words for missing, and any other text is
    itself.
    """
    alone = columns_alone(fitted, "hashed")
    old = replace(
        alone, schema=replace(alone.schema, source=replace(alone.schema.source, cells=None))
    )
    texts = {"hashed": ["NA", "True", "5.0", "true", "5"]}
    ids = {
        door: rows(DOORS[door](tmp_path, texts, old.schema), old)
        for door in ("csv", "parquet", "pandas")
    }
    assert ids["csv"][0] == 0 and 0 not in ids["parquet"] and ids["parquet"] == ids["pandas"]
    assert len({*ids["parquet"]}) == 5 and ids["csv"][1:] == ids["parquet"][1:]
    assert Encoder(old).batch(texts).ids.values_N.tolist() == ids["parquet"]


def rows(log: Log, transforms: Transforms) -> list[int]:
    return batch_of(log, transforms, training=False).ids.values_N.tolist()


def test_a_damaged_integer_is_refused_with_its_line_at_every_door(
    fitted: Transforms, tmp_path: Path
) -> None:
    alone = columns_alone(fitted, "whole")
    for door in ("csv", "parquet", "pandas"):
        log = DOORS[door](tmp_path, {"whole": ["5", "9", "x"]}, alone.schema)
        with pytest.raises(
            UserError,
            match="'whole', row 2: 'x' is no integer; its table numbers integers: mend it",
        ):
            batch_of(log, alone, training=False)


@pytest.mark.parametrize("scale", [1, 1000, 10**6])
def test_seconds_since_1970_are_a_time_as_text_too(tmp_path: Path, scale: int) -> None:
    """A text file has integers there; the same text in Parquet, in a frame and in a request is the
    same time.
    """
    random = np.random.default_rng(0)
    seconds = np.sort(1_772_323_200 + random.integers(0, 14 * 86_400, 600))
    times = [str(second * scale) for second in seconds]
    texts = {
        "ts": times,
        "item": [f"i{i % 9}" for i in range(600)],
        "price": [f"{i / 8}" for i in range(600)],
    }
    texts["click"] = [str(i % 3 % 2) for i in range(600)]
    prepare([write_csv(tmp_path, texts)], tmp_path / "out")
    transforms = data.open(tmp_path / "out").transforms
    assert transforms.schema.columns["ts"].format is None and "ts_hour" in transforms.schema.columns
    log = as_csv(tmp_path, texts, transforms.schema)
    for door in (as_parquet(pa.string()), as_frame(pa.table)):
        assert_same(
            batch_of(log, transforms),
            batch_of(door(tmp_path, texts, transforms.schema), transforms),
        )
    features = {name: values for name, values in texts.items() if name != "click"}
    asked = Encoder(transforms).batch(features)
    assert_same(batch_of(log, transforms, training=False), asked, with_roles=False)
    assert seconds_of_values(times, "ts", None, with_words=True).tolist() == seconds.tolist()


def prices(kind: pa.DataType) -> pa.Array:
    """3,000 prices, many of them a cent apart."""
    cents = np.random.default_rng(0).integers(1, 2000, 3000).tolist()
    if pa.types.is_string(kind) or pa.types.is_decimal(kind):
        return pa.array([f"{cent / 100:.2f}" for cent in cents]).cast(kind)
    return pa.array(np.array(cents) / 100).cast(kind, safe=False)


NUMBERS_OF_A_LOG = [
    pa.float64(),
    pa.float32(),
    pa.string(),
    pa.decimal128(12, 2),
    pa.decimal256(60, 10),
]


@pytest.mark.parametrize("kind", NUMBERS_OF_A_LOG, ids=str)
def test_a_number_beside_a_bound_is_in_its_bucket_through_every_door(
    kind: pa.DataType, tmp_path: Path
) -> None:
    """As FP32 and FP64 of V2, and as the shortest text of either in JSON."""
    table = pa.table({"click": np.arange(3000) % 2, "price": prices(kind)})
    schema = Schema(
        columns={
            "click": Column(kind="label"),
            "price": Column(kind="categorical", table="q", quantiles=64),
        },
        encodings={"q": Encoding()},
    )
    prepare(table_log(table), tmp_path / "out", schema=schema, split=Split(valid=0, test=0))
    transforms = Transforms.load(tmp_path / "out")
    wanted_N = (
        batch_of(table_log(table, transforms.schema.source), transforms).ids["price"].values_N
    )
    exact = table["price"].combine_chunks().cast(pa.float64(), safe=False).to_numpy()
    assert len(transforms.schema.columns["price"].boundaries or ()) > 60
    for ends in (-1, 1):  # of each bucket, its least and its greatest number
        assert len({wanted_N[at].item() for at in np.argsort(ends * exact)}) > 60
    narrow = exact.astype(np.float32)
    doors = {
        "FP64": tensor(exact, "FP64"),
        "FP32": tensor(narrow, "FP32"),
        "JSON": exact.tolist(),
        "JSON of float32": [float(str(number)) for number in narrow],
        "text": [str(number) for number in narrow],
        "decimals": table["price"].to_pylist(),
    }
    encoder = Encoder(transforms)
    for door, values in doors.items():
        assert torch.equal(encoder.batch({"price": values}).ids["price"].values_N, wanted_N), door


def tensor(x_N: np.ndarray, datatype: str) -> list[Any]:
    """What the service makes of a binary tensor."""
    v2 = pytest.importorskip("sparrow.apps.service.protocols.v2", reason="needs the extra [serve]")
    asked = v2.request_of_tensors(
        [v2.Tensor("price", datatype, [len(x_N)])],
        [x_N.tobytes()],
        {},
        v2.Sources(frozenset({"price"})),
        v2.Limits(candidates=len(x_N)),
    )
    values: list[Any] = asked.candidates["price"]
    return values
