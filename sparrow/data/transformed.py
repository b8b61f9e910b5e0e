"""Raw columns -> what the model is fed: one function, called when a log is prepared and when a request is served."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sparrow.core.errors import UserError, suggest
from sparrow.data.schema import Column, Schema
from sparrow.features import as_ids, as_lists, as_numbers, encode, hash_ids
from sparrow.features import transform as transform_numbers

Floats = npt.NDArray[np.float64]


def transform(schema: Schema, batch: pa.RecordBatch | pa.Table, *, training: bool, row0: int = 0) -> pa.Table:
    """Apply a fitted schema to raw rows [N]: a table [N] of feature columns in the schema's order.

    label, weight, baseline and numeric columns become float32, time, group and categorical ones int64, lists
    large_list<int64>. training: every column must be there and every label known; else only features must, and a
    missing label is NaN. row0: the log's row of the batch's first one, for errors.
    Raises UserError for an absent column and for a value that does not fit its kind, naming column and row.
    """
    columns: dict[str, pa.Array] = {}
    for name, column in schema.columns.items():
        optional = not training and column.kind in ("label", "weight", "time", "group", "baseline")
        if column.kind == "ignore" or (optional and (column.source or name) not in batch.schema.names):
            continue
        columns[name] = _convert(schema, name, raw_column(batch, name, column), training, row0)
    return pa.table(columns)


def raw_column(batch: pa.RecordBatch | pa.Table, name: str, column: Column) -> pa.Array:
    """A feature's raw column in one piece; UserError with what there is, when it is absent."""
    source = column.source or name
    if source not in batch.schema.names:
        has = suggest(source, batch.schema.names)
        raise UserError(f"columns.{name}: no column {source!r} in the log{has}")
    values = batch.column(source)
    return values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values


def labels(raw: pa.Array, name: str, column: Column, *, training: bool, row0: int) -> Floats:
    """0/1 labels float64 [N] of a raw column, missing ones NaN (UserError when training)."""
    if column.positive is not None and not _is_number(raw.type):
        raw = pc.equal(raw.cast(pa.string()), column.positive)
    elif not (_is_number(raw.type) or pa.types.is_boolean(raw.type) or pa.types.is_null(raw.type)):
        remedy = f"set columns.{name}.positive to the value that counts as 1"
        raise UserError(f"label {name!r}: {raw.type} where 0 and 1 are needed; {remedy}")
    y_N = as_numbers(raw, name, row0)
    if column.positive is not None and _is_number(raw.type):
        y_N = np.where(np.isnan(y_N), np.nan, y_N == _number(column.positive, name))
    missing = np.flatnonzero(np.isnan(y_N))
    if training and len(missing):
        raise UserError(f"label {name!r}, row {row0 + missing[0]}: missing; leave rows without a label out of the log")
    bad = np.flatnonzero(~((y_N == 0) | (y_N == 1) | np.isnan(y_N)))
    if len(bad):
        remedy = f"labels are 0 and 1; for others set columns.{name}.positive to the value that counts as 1"
        raise UserError(f"label {name!r}, row {row0 + bad[0]}: {y_N[bad[0]]:g}; {remedy}")
    return y_N


def times(raw: pa.Array, name: str, row0: int) -> npt.NDArray[np.int64]:
    """Times int64 [N]: integers as they are, timestamps and dates in microseconds; UserError for missing ones."""
    if raw.null_count:
        i = pc.index(raw.is_null(), True).as_py()
        raise UserError(f"time {name!r}, row {row0 + i}: missing; fill it in, or split by ratio and make it 'ignore'")
    try:
        if pa.types.is_date(raw.type) or pa.types.is_timestamp(raw.type):
            raw = raw.cast(pa.timestamp("us"), safe=False)
        return raw.cast(pa.int64()).to_numpy(zero_copy_only=False)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        remedy = "write times as integers or timestamps"
        raise UserError(f"time {name!r}: {raw.type} is not a time ({error}); {remedy}") from None


def _convert(schema: Schema, name: str, raw: pa.Array, training: bool, row0: int) -> pa.Array:
    column = schema.columns[name]
    if column.kind == "label":
        return pa.array(labels(raw, name, column, training=training, row0=row0).astype(np.float32))
    if column.kind == "weight":
        return pa.array(_weights(raw, name, row0).astype(np.float32))
    if column.kind == "baseline":
        return pa.array(_probabilities(raw, name, row0).astype(np.float32))
    if column.kind == "time":
        return pa.array(times(raw, name, row0))
    if column.kind == "group":
        return pa.array(hash_ids(as_ids(raw, name, lambda i: row0 + i)))
    if column.kind == "numeric":
        kind = column.transform
        if kind != "none" and (column.mean is None or column.std is None):
            raise UserError(f"columns.{name}.mean: not fitted; use the schema that prepare wrote")
        return pa.array(transform_numbers(as_numbers(raw, name, row0), kind, column.mean, column.std))
    assert column.table is not None
    table = schema.tables[column.table]
    if table.encoding is None or (table.encoding == "range" and (table.low is None or table.high is None)):
        raise UserError(f"tables.{column.table}: not fitted; use the schema that prepare wrote")
    low, high = (table.low, table.high) if table.encoding == "range" else (None, None)
    if column.kind == "categorical":
        return pa.array(encode(as_ids(raw, name, lambda i: row0 + i), name, low, high))
    ids, offsets, _ = as_lists(raw, name, row0, column.max_length, column.separator)
    return pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(encode(ids, name, low, high)))


def _weights(raw: pa.Array, name: str, row0: int) -> Floats:
    w_N = as_numbers(raw, name, row0)
    bad = np.flatnonzero(~(w_N >= 0))
    if len(bad):
        raise UserError(
            f"weight {name!r}, row {row0 + bad[0]}: {w_N[bad[0]]:g}; weights are 0 or more and never missing"
        )
    return w_N


def _probabilities(raw: pa.Array, name: str, row0: int) -> Floats:
    p_N = as_numbers(raw, name, row0)
    bad = np.flatnonzero(~((p_N >= 0) & (p_N <= 1)))
    if len(bad):
        raise UserError(f"baseline {name!r}, row {row0 + bad[0]}: {p_N[bad[0]]:g}; probabilities lie in 0..1")
    return p_N


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)


def _number(text: str, name: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UserError(f"columns.{name}.positive: {text!r} is not a number, as the label is; mend it") from None
