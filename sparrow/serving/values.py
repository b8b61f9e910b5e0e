"""A request's Python values: rows as lists, and columns of values as arrays of one type."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from sparrow.core.arrays import Float64s
from sparrow.core.errors import UserError, suggest
from sparrow.kernels.encode import Rows

_TYPES = {"null": pa.null(), "bool": pa.bool_(), "int": pa.int64(), "float": pa.float64()}
_TYPES |= {"text": pa.string(), "bytes": pa.binary()}


def stacked(parts: Sequence[Rows]) -> tuple[Rows, list[int]]:
    """Returns the rows of several requests as those of one, and how many each has."""
    lists = [as_lists(rows) for rows in parts]
    counts = [count_of(rows, 0) for rows in lists]
    if len(lists) == 1:
        return lists[0], counts
    columns = [rows for rows in lists if isinstance(rows, Mapping)]
    if len(columns) == len(lists) > 0 and all(rows.keys() == columns[0].keys() for rows in columns):
        return {
            name: list(itertools.chain.from_iterable(rows[name] for rows in columns)) for name in columns[0]
        }, counts
    each = [_turned(rows) if isinstance(rows, Mapping) else rows for rows in lists]
    return list(itertools.chain.from_iterable(each)), counts


def _turned(columns: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Returns a dict of lists as a list of dicts."""
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def as_lists(rows: Rows) -> Rows:
    """Returns a request as a list of dicts or a dict of lists."""
    if not isinstance(rows, Mapping):
        return rows if isinstance(rows, list) else list(rows)
    if isinstance(rows, dict) and all(isinstance(values, list) for values in rows.values()):
        return rows
    for name, values in rows.items():
        if isinstance(values, str) or not isinstance(values, Iterable):
            raise UserError(f"column {name!r}: {values!r} is not a list; write rows as [{{...}}], or lists of values")
    return {name: v.tolist() if isinstance(v, np.ndarray) else list(v) for name, v in rows.items()}


def count_of(rows: Rows, least: int) -> int:
    """Returns how many rows a request has."""
    if isinstance(rows, Mapping):
        lengths = {name: len(values) for name, values in rows.items()}
        if not lengths:
            return least
        name, count = next(iter(lengths.items()))
        for other, length in lengths.items():
            if length != count:
                raise UserError(f"column {other!r}: {length} values where {name!r} has {count}; give as many")
        return count
    return len(rows)


def values_of(rows: Rows, source: str) -> list[Any]:
    """Returns a column of a request."""
    if isinstance(rows, Mapping):
        if source not in rows:
            raise UserError(f"no column {source!r} in the request{suggest(source, rows)}")
        values = rows[source]
        return list(values)
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise UserError(f"row {number}: {row!r} is no object with columns; write it as name: value")
        if source not in row:
            raise UserError(f"row {number}: no {source!r}; give None where there is none{suggest(source, row)}")
    return [row[source] for row in rows]


def kind_of_value(value: Any, name: str, row: int, *, nested: bool = True) -> str:
    """Returns of what kind a value is; of a list, "list:" and that of its elements."""
    if value is None:
        return "null"
    if isinstance(value, (bool, np.bool_)):
        return "bool"
    if isinstance(value, (int, np.integer)):
        return "int" if -(2**63) <= int(value) < 2**63 else "text"
    for kinds, found in (((float, np.floating), "float"), (str, "text"), (bytes, "bytes")):
        if isinstance(value, kinds):
            if not _is_text(value):
                raise UserError(f"column {name!r}, row {row}: {value!r} is no text in UTF-8; write it as such, or null")
            return found
    if isinstance(value, (list, tuple, np.ndarray)) and nested:
        of = sorted({kind_of_value(one, name, row, nested=False) for one in value} - {"null"})
        if of == ["float", "int"] and all(abs(one) <= 2**53 for one in value if one is not None and one == one):
            of = ["float"]
        return "list:" + (of[0] if len(of) == 1 else "text" if of else "null")
    raise UserError(f"column {name!r}, row {row}: {value!r} is no value; give a number, text, a list of them, or null")


def _is_text(value: Any) -> bool:
    """Returns whether UTF-8 can say a text, or bytes are UTF-8; half of a surrogate pair in JSON is neither."""
    try:
        value.encode() if isinstance(value, str) else value.decode() if isinstance(value, bytes) else None
    except UnicodeError:
        return False
    return True


def array_of(values: list[Any], kind: str) -> pa.Array:
    """Returns values of one kind as an array."""
    if kind.startswith("list:"):
        of = kind.removeprefix("list:")
        return pa.array([[_plain(one, of) for one in value] for value in values], pa.list_(_TYPES[of]))
    return pa.array([_plain(value, kind) for value in values], _TYPES[kind])


def _plain(value: Any, kind: str) -> Any:
    """Returns a value as Arrow takes it. Numbers among texts are written out, as they are hashed."""
    if isinstance(value, np.generic):
        value = value.item()
    if kind != "text" or value is None or isinstance(value, str):
        return value
    if isinstance(value, float):
        if value != value:
            return None
        if not (value.is_integer() and abs(value) <= 2**53):
            raise UserError(f"{value!r} is not an id; write ids as integers or strings")
        return str(int(value))
    if isinstance(value, bytes):
        return value.decode()
    return str(value).lower() if isinstance(value, bool) else str(value)


def lists_of_numbers(values: list[Any], size: int) -> Float64s | None:
    """Returns vectors as float64 [N, S], NaN where one is missing; None where one is anything but a list of numbers."""
    there = [i for i, value in enumerate(values) if value is not None]
    if not all(isinstance(values[i], (list, np.ndarray)) for i in there):
        return None
    try:
        with np.errstate(over="ignore"):
            x_MS = np.array([values[i] for i in there], np.float64).astype(np.float32)
    except (ValueError, TypeError, OverflowError):
        return None
    if there and (x_MS.shape != (len(there), size) or not np.isfinite(x_MS).all()):
        return None
    x_NS = np.full((len(values), size), np.nan)
    if there:
        x_NS[there] = x_MS
    return x_NS
