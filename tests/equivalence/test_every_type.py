"""A column of every type of Arrow, alone, in a list and in a struct: it is read, or left out with
file and column.

What is read, and what `prepare` takes as some feature, passes every door after it: predict, export,
scorer, service, and page.
"""

from __future__ import annotations

import datetime
import decimal
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

import sparrow
from sparrow.core import UserError
from sparrow.data.logs.read import open_log
from sparrow.data.logs.tables import table_log
from sparrow.data.preparation.job import prepare
from sparrow.features.schema import Column, Encoding, Schema, Source, Split
from sparrow.features.transforms import typed
from sparrow.features.types import as_read, is_list, read_as
from sparrow.serving import load
from sparrow.serving.export import export
from sparrow.serving.scorer import CLOSE, SCORE
from sparrow.serving.values import json_value, python_rows
from sparrow.trained.predict import predict
from sparrow.training import train
from tests.runs import small_run

ROWS = 120
WHOLE: list[Any] = [5, 7, 9, None]
TEXTS: list[Any] = ["a", "b", "c", None]
BYTES: list[Any] = [b"aa", b"bb", b"cc", None]
DECIMALS: list[Any] = [decimal.Decimal(5), decimal.Decimal(-7), decimal.Decimal(9), None]
DAYS: list[Any] = [datetime.datetime(2026, 1, day) for day in (1, 2, 3)] + [None]
LISTS: list[Any] = [[1, 2], [3, 1], [2, 5], None]
UNION = [pa.array([0, 1, 0, 1], pa.int8()), pa.array([0, 0, 1, 1], pa.int32())]
EACH = [pa.array([1, 2]), pa.array(["a", "b"])]


def values() -> dict[str, pa.Array]:
    """Four values of each type, the last one missing where the type can say so."""
    of_numbers = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
    made = {name: pa.array(WHOLE, getattr(pa, name)()) for name in of_numbers}
    made |= {
        str(kind): pa.array([1.5, 2.0, 2.5, None], kind)
        for kind in (pa.float16(), pa.float32(), pa.float64())
    }
    made |= {
        str(kind): pa.array(TEXTS, kind)
        for kind in (pa.string(), pa.large_string(), pa.string_view())
    }
    of_bytes = (pa.binary(), pa.large_binary(), pa.binary_view(), pa.binary(2))
    made |= {str(kind): pa.array(BYTES, kind) for kind in of_bytes}
    decimals = (
        pa.decimal32(9, 2),
        pa.decimal64(18, 0),
        pa.decimal128(38, 4),
        pa.decimal256(76, 10),
    )
    made |= {str(kind): pa.array(DECIMALS, kind) for kind in decimals}
    made["fractions"] = pa.array(
        [decimal.Decimal("9.99"), decimal.Decimal("0.01"), decimal.Decimal(-7), None]
    )
    times = (pa.timestamp("us"), pa.timestamp("ns", "UTC"), pa.date32(), pa.date64())
    made |= {str(kind): pa.array(DAYS, kind) for kind in times}
    made["nanoseconds"] = pa.array(
        [1772323200000000001, 1772409600000000002, 7, None], pa.timestamp("ns", "+05:30")
    )
    spans = (pa.time32("s"), pa.time64("us"), pa.duration("s"))
    made |= {
        str(kind): pa.array([1, 2, 3, None]).cast(pa.int32()).cast(pa.int64()).cast(kind)
        for kind in spans[1:]
    }
    made[str(spans[0])] = pa.array([1, 2, 3, None], pa.int32()).cast(spans[0])
    made["interval"] = pa.array(
        [(1, 2, 3), (1, 1, 1), (0, 0, 1), None], pa.month_day_nano_interval()
    )
    made["null"] = pa.nulls(4)
    made["bool"] = pa.array([True, False, True, None])
    lists = (pa.list_, pa.large_list, pa.list_view, pa.large_list_view)
    made |= {kind.__name__: pa.array(LISTS, kind(pa.int64())) for kind in lists}
    made["list of two"] = pa.array(
        [[0.5, 1.0], [1.5, 2.0], [2.5, 0.0], [1.0, 1.0]], pa.list_(pa.float32(), 2)
    )
    made["struct"] = pa.array([{"a": 1, "b": "x"}, {"a": 2, "b": "y"}, None, {"a": 1, "b": None}])
    made["struct of nothing"] = pa.array([{}, {}, None, {}], pa.struct([]))
    made["map"] = pa.array([[("a", 1)], [("b", 2)], [], None], pa.map_(pa.string(), pa.int64()))
    made["dictionary"] = pa.array(TEXTS).dictionary_encode()
    made["ordered"] = made["dictionary"].cast(pa.dictionary(pa.int8(), pa.string(), ordered=True))
    views = pa.array(["a", "b"], pa.string_view())
    made["views in a dictionary"] = pa.DictionaryArray.from_arrays([0, 1, 0, None], views)
    made["runs"] = pc.run_end_encode(pa.array(["a", "b", "b", None]))
    made["sparse union"] = pa.UnionArray.from_sparse(
        UNION[0], [pa.array([1, 2, 3, 4]), pa.array(list("abcd"))]
    )
    made["dense union"] = pa.UnionArray.from_dense(*UNION, EACH)
    made["uuid"] = pa.array([uuid.UUID(int=i).bytes for i in (1, 2, 3)] + [None], pa.uuid())
    made["json"] = pa.array(['{"a": 1}', '{"a": 2}', "[]", None], pa.json_())
    made["bool8"] = pa.ExtensionArray.from_storage(pa.bool8(), pa.array([1, 0, 1, None], pa.int8()))
    tensor = pa.fixed_shape_tensor(pa.float32(), [2])
    made["tensor"] = pa.ExtensionArray.from_storage(tensor, made["list of two"])
    made["opaque"] = pa.ExtensionArray.from_storage(
        pa.opaque(pa.string(), "t", "v"), pa.array(TEXTS)
    )
    made["opaque map"] = pa.ExtensionArray.from_storage(
        pa.opaque(made["map"].type, "t", "v"), made["map"]
    )
    return made


VALUES = values()
UNREAD = {"time32[s]", "time64[us]", "duration[s]", "interval", "struct of nothing"}
UNREAD |= {"map", "sparse union", "dense union", "opaque map"}
NO_LIST = UNREAD | {"list_", "large_list", "list_view", "large_list_view", "list of two", "tensor"}
NO_LIST |= {"timestamp[us]", "timestamp[ns, tz=UTC]", "date32[day]", "date64[ms]"}
NO_LIST |= {"nanoseconds"}


def shapes(name: str) -> dict[str, pa.Array]:
    """A type's values, lists of one, and structs with one."""
    column = VALUES[name]
    lists = pa.ListArray.from_arrays([0, 1, 2, 3, 4], column)
    return {
        name: column,
        f"list of {name}": lists,
        f"in {name}": pa.StructArray.from_arrays([column], ["it"]),
    }


@pytest.fixture(scope="module")
def frame() -> pa.Table:
    columns = {"click": pa.array(np.arange(ROWS) // 2 % 2)}
    for name in VALUES:
        for shape, column in shapes(name).items():
            # taking knows few of the types
            columns[shape] = pa.chunked_array([column] * (ROWS // 4))
    return pa.table(columns)


def test_no_type_of_arrow_is_forgotten() -> None:
    """A later Arrow has more of them, for which `sparrow/features/types.py` and VALUES need a
    row.
    """
    of_arrow = {name for name in dir(pa.lib) if name.startswith("Type_")}
    of_arrow -= {"Type_INTERVAL_DAY_TIME", "Type_INTERVAL_MONTHS"}  # Python cannot make them
    ours = {getattr(pa.lib, name): name for name in of_arrow}
    kinds = {
        column.type.storage_type.id if is_extension(column.type) else column.type.id
        for column in VALUES.values()
    }
    assert {ours[kind] for kind in kinds if kind in ours} == of_arrow
    known = {type(column.type).__name__ for column in VALUES.values()}
    extensions = {name for name in dir(pa) if is_extension_type(getattr(pa, name))}
    assert extensions - known == {"BaseExtensionType", "ExtensionType", "UnknownExtensionType"}


def is_extension(kind: pa.DataType) -> bool:
    return isinstance(kind, pa.BaseExtensionType)


def is_extension_type(of: object) -> bool:
    return isinstance(of, type) and issubclass(of, pa.BaseExtensionType)


@pytest.mark.parametrize("name", VALUES)
def test_a_column_is_read_as_what_the_table_says(name: str) -> None:
    for shape, column in shapes(name).items():
        is_unread = (
            name in NO_LIST if shape.startswith("list of ") and shape != name else name in UNREAD
        )
        kind = read_as(column.type)
        assert (kind is None) == (is_unread and not shape.startswith("in ")), shape
        for piece in (column, column.slice(1, 2), column.slice(0, 0)) if kind is not None else ():
            made = as_read(piece)
            made.validate(full=True)
            assert made.type == kind and len(made) == len(piece)
            if name not in ("uuid", "bool8", "float16", "halffloat") and not pa.types.is_struct(
                kind
            ):
                assert made.to_pylist() == piece.to_pylist(), shape


def told_of(notes: tuple[str, ...], log: str, name: str) -> bool:
    return any(note.startswith(f"{log}: column {name!r} is left out, as ") for note in notes)


def paths(name: str, table: pa.Table) -> list[str]:
    """The columns that one becomes."""
    kind = read_as(table.schema.field(name).type)
    inner = (
        kind.value_type
        if kind is not None and pa.types.is_nested(kind) and not pa.types.is_struct(kind)
        else kind
    )
    if inner is None or not pa.types.is_struct(inner):
        return [name]
    made = pa.table({f"{name}.{field.name}": pa.nulls(0, field.type) for field in inner})
    return [path for each in made.column_names for path in paths(each, made)]


def test_a_frame_of_all_types_is_read(frame: pa.Table, tmp_path: Path) -> None:
    made = prepare(
        table_log(frame), tmp_path / "out", label="click", split=Split(valid=0.2, test=0)
    )
    check_read(frame, made.schema, made.notes, "the table")


@pytest.mark.slow
def test_a_log_of_all_types_is_trained_on_and_scored(frame: pa.Table, tmp_path: Path) -> None:
    log = tmp_path / "log.parquet"
    written = frame.select(
        [name for name in frame.column_names if can_be_written(frame, name, tmp_path)]
    )
    assert written.num_columns > 0.7 * frame.num_columns
    pq.write_table(written, log)
    made = prepare([log], tmp_path / "out", label="click", split=Split(valid=0.2, test=0))
    check_read(written, made.schema, made.notes, str(log))
    quick = {"threads": 1, "loop.epochs": 1}
    fitted = sparrow.fit(written, label="click", settings=quick, run_dir=tmp_path / "run")
    predict(tmp_path / "run", [log], tmp_path / "scores.parquet")
    scores = pq.read_table(tmp_path / "scores.parquet")["score"].to_numpy()
    np.testing.assert_array_equal(scores, fitted.predict(written))


def check_read(table: pa.Table, schema: Schema, notes: tuple[str, ...], log: str) -> None:
    for name in table.column_names:
        for path in paths(name, table):
            assert (path in schema.columns) != told_of(notes, log, path), (
                path,
                table.schema.field(name).type,
            )
    assert "map" not in schema.columns and schema.columns["uuid"].kind == "categorical"
    assert (
        schema.columns["ordered"].kind == "categorical"
        and schema.columns["struct.a"].kind != "label"
    )


def can_be_written(table: pa.Table, name: str, folder: Path) -> bool:
    try:
        pq.write_table(table.select([name]), folder / "one.parquet")
        pq.read_table(folder / "one.parquet")
    except (pa.ArrowException, NotImplementedError, OSError):
        return False
    return True


@pytest.mark.parametrize("name", ["map", "dense union"])
def test_a_feature_of_a_type_that_is_not_read_is_refused_with_file_and_column(
    frame: pa.Table, tmp_path: Path, name: str
) -> None:
    schema = Schema(columns={"click": Column(kind="label"), name: Column(kind="numeric")})
    says = (
        rf"columns\.{name_of(name)}: the table: column '{name_of(name)}' is left out, as .* to have"
        r" it read"
    )
    with pytest.raises(UserError, match=says):
        prepare(table_log(frame), tmp_path / "out", schema=schema)
    with pytest.raises(UserError, match=says):
        sparrow.fit(frame, schema=schema, run_dir=tmp_path / "run")


def name_of(name: str) -> str:
    return name.replace("[", r"\[").replace("]", r"\]")


def test_files_that_differ_in_what_can_be_read_are_read_alike(tmp_path: Path) -> None:
    """What one file has in a type that is not read is left out of all; the note names that file."""
    for i, column in enumerate(([5, 7], VALUES["map"].slice(0, 2))):
        pq.write_table(pa.table({"click": [0, 1], "x": column}), tmp_path / f"{i}.parquet")
    log = open_log([tmp_path])
    assert set(log.types) == {"click"}
    assert [
        note.startswith(f"{tmp_path / '1.parquet'}: column 'x' is left out") for note in log.notes()
    ] == [True]


# -- what is read, through every door --------------------------------------------------------------

ROLES: dict[str, Column] = {
    "number": Column(kind="numeric"),
    "bare number": Column(kind="numeric", transform="none"),
    "logarithm": Column(kind="numeric", transform="log"),
    "number that may be missing": Column(kind="numeric", missing=("5", "1.5", "9.99")),
    "id": Column(kind="categorical", table="t"),
    "hashed id": Column(kind="categorical", table="t"),
    "quantile": Column(kind="categorical", table="t", quantiles=3),
    "hour": Column(kind="categorical", table="t", part="hour"),
    "cross": Column(kind="categorical", table="t", cross=("item", "t")),
    "count": Column(kind="numeric", counts="seen"),
    "list": Column(kind="list", table="t"),
    "weights": Column(kind="list", table="t", weights="w"),
    "vector": Column(kind="vector"),
}
QUICK = (
    "float",
    "fractions",
    "decimal256(76, 10)",
    "nanoseconds",
    "date32[day]",
    "uint64",
    "bool",
    "null",
    "list_",
)
ITEM = {"item": Column(kind="categorical", table="item")}
KNOWN = Encoding(min_count=1)


class Part(NamedTuple):
    """A column of a log in a role. raw: what the log has for it. encodings: of its table."""

    columns: dict[str, Column]
    raw: dict[str, pa.Array]
    encodings: dict[str, Encoding]


def in_role(shape: str, values: pa.Array, role: str) -> Part:
    """A column, by the name `ROLE of SHAPE`, of four values."""
    name, column, raw = f"{role} of {shape}", ROLES[role], {shape: values}
    table = name if column.table else None
    if role == "cross":
        columns = {f"part of {shape}": Column(kind="ignore", source=shape)}
        columns[name] = replace(column, table=table, cross=("item", f"part of {shape}"))
    elif role == "weights":
        read = as_read(values)
        lengths = (
            pc.list_value_length(read).to_pylist() if is_list(read.type) else [1] * len(values)
        )
        raw[f"ids of {shape}"] = pa.array([None if n is None else ["x", "y"][:n] for n in lengths])
        columns = {name: replace(column, table=table, source=f"ids of {shape}", weights=shape)}
    elif role == "vector":
        columns = {name: replace(column, source=shape, size=2 if shape in VALUES else 1)}
    else:
        columns = {name: replace(column, source=shape, table=table)}
    encoding = Encoding(kind="hash", rows=32) if role == "hashed id" else KNOWN
    return Part(columns, raw, {table: encoding} if table else {})


def accepted(name: str) -> dict[str, Part]:
    """The parts that a log with a type can have: all those that are not refused in a line."""
    parts: dict[str, Part] = {}
    lists = pa.ListArray.from_arrays([0, 1, 2, 3, 3], VALUES[name])
    for shape, values in ((name, VALUES[name]), (f"lists of {name}", lists)):
        kind = read_as(values.type)
        # of a struct, each field is a column
        for role in () if kind is None or pa.types.is_struct(kind) else ROLES:
            # of numbers, see test_doors.py
            if role == "hour" and not pa.types.is_temporal(values.type):
                continue
            part = in_role(shape, values, role)
            schema = Schema(
                columns=ITEM | part.columns,
                encodings={"item": KNOWN} | part.encodings,
                source=Source(cells=2),
            )
            try:
                typed(schema, pa.table({"item": list("abca")} | part.raw), training=False)
            except UserError:
                continue
            # else none is there
            if name != "null" or (shape == name and role in ("id", "hashed id", "cross", "list")):
                parts[f"{role} of {shape}"] = part
    return parts


@pytest.mark.parametrize(
    "names", [QUICK, pytest.param(tuple(VALUES), marks=pytest.mark.slow)], ids=["few", "all"]
)
def test_a_log_of_a_type_in_every_role_passes_every_door(
    names: tuple[str, ...], tmp_path: Path
) -> None:
    parts = {key: part for name in names for key, part in accepted(name).items()}
    roles_of = {
        shape: {key.partition(" of ")[0] for key in parts if key.endswith(f" of {shape}")}
        for shape in VALUES
    }
    assert roles_of["fractions"] >= {"number", "bare number", "logarithm", "quantile"}
    assert roles_of["decimal256(76, 10)"] >= {"id", "hashed id", "quantile", "cross", "count"}
    assert "hour" in roles_of["nanoseconds"] & roles_of["date32[day]"]
    assert {f"{role} of lists of fractions" for role in ("vector", "weights")} <= parts.keys()
    log = tmp_path / "log.parquet"
    raw = {name: values for part in parts.values() for name, values in part.raw.items()}
    columns: dict[str, Any] = {
        "click": np.arange(ROWS) // 2 % 2,
        "item": [f"i{i % 5}" for i in range(ROWS)],
    }
    columns |= {name: pa.chunked_array([values] * (ROWS // 4)) for name, values in raw.items()}
    table = pa.table(columns)
    lost = {name for name in table.column_names if not can_be_written(table, name, tmp_path)}
    parts = {key: part for key, part in parts.items() if not lost & part.raw.keys()}
    pq.write_table(table.drop_columns(list(lost)), log)
    schema = Schema(
        columns={"click": Column(kind="label")}
        | ITEM
        | {n: c for part in parts.values() for n, c in part.columns.items()},
        encodings={"item": KNOWN}
        | {n: e for part in parts.values() for n, e in part.encodings.items()},
    )
    prepare([log], tmp_path / "prepared", schema=schema, split=Split(valid=0.2, test=0))
    train(small_run(tmp_path / "prepared", tmp_path / "run"))
    predict(tmp_path / "run", [log], tmp_path / "scores.parquet")
    export(tmp_path / "run", tmp_path / "model", [log])
    check_served(
        tmp_path / "model", log, pq.read_table(tmp_path / "scores.parquet")["score"].to_numpy()
    )


def check_served(model: Path, log: Path, scores: np.ndarray) -> None:
    """The rows of a log have the scores of `predict` in Python, and through the service in JSON and
    as tensors.
    """
    scorer = load(model)
    rows = python_rows(pq.read_table(log, columns=list(scorer.encoder.sources)))
    np.testing.assert_allclose(scorer.score(rows)[:, 0], scores, atol=CLOSE)
    pytest.importorskip("starlette", reason="needs the extra [serve]")
    from sparrow.apps.service.app import Service
    from sparrow.apps.service.limits import Limits
    from sparrow.apps.service.logs import Logs
    from sparrow.apps.service.settings import Settings
    from sparrow.apps.service.versions import Versions
    from tests.apps.service.asking import ask

    settings = Settings(logs=Logs(served_log=model.parent / "served", sample=1.0))
    service = Service(
        Versions(scorer), Limits(deadline_ms=60_000, columns=3 * len(rows[0])), settings
    )
    try:
        for first in range(0, 64, 8):
            example = ask(service, f"/example/{first}")
            assert example.status == 200, example
            got = ask(service, "/rank", example.json)
            kept = scorer.golden_rows()[0][SCORE + "click"].to_numpy()[first : first + 8]
            np.testing.assert_allclose(got.json["scores"]["click"], kept, atol=CLOSE)
        assert ask(service, "/explain/0", example.json).status == 200
        said = [{name: json_value(value) for name, value in row.items()} for row in rows]
        got = ask(service, "/rank", {"candidates": said})
        np.testing.assert_allclose(got.json["scores"]["click"], scores, atol=CLOSE)
        inputs = ask(service, "/v2/models/model").json["inputs"]
        tensors = [
            tensor
            for one in inputs
            if ":" not in one["name"]
            for tensor in tensors_of(one, said, inputs)
        ]
        got = ask(service, "/v2/models/model/infer", {"inputs": tensors})
        assert got.status == 200, got
        np.testing.assert_allclose(got.json["outputs"][0]["data"], scores, atol=CLOSE)
    finally:
        service.batcher.close()
        service.served.close()
    assert sum(
        pq.read_table(file).num_rows for file in (model.parent / "served").iterdir()
    ) == 64 + 2 * len(scores)


def tensors_of(
    described: dict[str, Any], rows: list[dict[str, Any]], inputs: list[dict[str, Any]]
) -> list[Any]:
    """The tensors of a column, as the metadata describes them."""
    name, kind = described["name"], described["datatype"]
    values = [row[name] for row in rows]
    tensors = [(name + ":null", "BOOL", [value is None for value in values])]
    if any(one["name"] == name + ":lengths" for one in inputs):
        tensors.append((name + ":lengths", "INT64", [len(value or ()) for value in values]))
        values = [element for value in values for element in value or ()]
    as_kind = {"BYTES": str, "BOOL": bool, "INT64": int}.get(kind, float)
    data = [as_kind() if value is None else as_kind(value) for value in values]
    return [
        {"name": n, "datatype": k, "shape": [len(d)], "data": d}
        for n, k, d in [*tensors, (name, kind, data)]
    ]


def test_bytes_that_are_no_text_are_ids_in_python(tmp_path: Path) -> None:
    """JSON has none."""
    ids = pa.array([b"\xff\x00", b"\xfe\x00", b"ab", None] * (ROWS // 4), pa.binary(2))
    lists = pa.ListArray.from_arrays(np.arange(ROWS + 1, dtype=np.int32), ids)
    columns = {"click": np.arange(ROWS) // 2 % 2, "id": ids, "ids": lists, "x": np.arange(ROWS) / 8}
    pq.write_table(pa.table(columns), tmp_path / "log.parquet")
    kinds = {"click": Column(kind="label"), "id": Column(kind="categorical", table="id")}
    kinds |= {"ids": Column(kind="list", table="ids"), "x": Column(kind="numeric")}
    schema = Schema(columns=kinds, encodings={"id": KNOWN, "ids": KNOWN})
    prepare(
        [tmp_path / "log.parquet"],
        tmp_path / "prepared",
        schema=schema,
        split=Split(valid=0.2, test=0),
    )
    train(small_run(tmp_path / "prepared", tmp_path / "run"))
    predict(tmp_path / "run", [tmp_path / "log.parquet"], tmp_path / "scores.parquet")
    export(tmp_path / "run", tmp_path / "model", [tmp_path / "log.parquet"])
    scorer = load(tmp_path / "model")
    rows = pq.read_table(tmp_path / "log.parquet", columns=list(scorer.encoder.sources)).to_pylist()
    scores = pq.read_table(tmp_path / "scores.parquet")["score"].to_numpy()
    np.testing.assert_allclose(scorer.score(rows)[:, 0], scores, atol=CLOSE)
