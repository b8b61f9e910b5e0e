"""A request's Python values: their columns, and these as arrays of one type."""

from __future__ import annotations

import datetime
import decimal
import re
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import pyarrow as pa

from sparrow.core.arrays import Float64s, Int64s
from sparrow.core.errors import UserError, suggest
from sparrow.features.cells import without_words
from sparrow.features.schema import Schema
from sparrow.features.times import as_times, seconds_of, spelt_integers, unit_of
from sparrow.kernels.encode import Rows

_TYPES = {"null": pa.null(), "bool": pa.bool_(), "int": pa.int64(), "float": pa.float64()}
_TYPES |= {"text": pa.string(), "bytes": pa.binary(), "time": pa.timestamp("us")}
_DIGITS = 76  # of Arrow's largest decimals
_ISO_DATE = re.compile(r"\s*\d{4}-\d\d-\d\d")
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


def python_rows(table: pa.Table) -> list[dict[str, Any]]:
    """Returns raw rows of a log as a request has them. Times lose their nanoseconds, which only
    pandas could hold.
    """
    for place, field in enumerate(table.schema):
        if pa.types.is_timestamp(field.type) and field.type.unit == "ns":
            times = table[field.name].cast(pa.timestamp("us", field.type.tz), safe=False)
            table = table.set_column(place, field.name, times)
    return list(table.to_pylist())


def json_value(value: Any) -> Any:
    """Returns a raw value of a log as a request in JSON says it, from which the same number, id or
    time is read.

    Bytes that are no text in UTF-8 cannot be said: they become other text, and so an id that nobody
    knows.
    """
    if isinstance(value, list):
        return [json_value(element) for element in value]
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, datetime.date):
        return value.isoformat()
    if isinstance(value, uuid.UUID):
        return str(value)
    if value != value:
        return None
    if isinstance(value, decimal.Decimal):
        integer = int(value) if abs(value) < 2**63 else str(int(value))
        return integer if _is_whole(value) else float(value)
    return value


def missing_together(schema: Schema) -> list[set[str]]:
    """Returns the columns of the log in sets that are missing together: a list without its weights
    is refused.
    """
    groups: list[set[str]] = []
    for name in (*schema.sparse, *schema.dense):
        column = schema.columns[name]
        if column.transform != "missing" and not column.cross:
            names = {
                source
                for source in (column.source or name, column.weights)
                if source and source != ":"
            }
            touching = [group for group in groups if group & names]
            groups = [group for group in groups if not group & names] + [names.union(*touching)]
    return groups


def count_of(rows: Rows, least: int) -> int:
    """Returns how many rows a request has."""
    if isinstance(rows, Mapping):
        lengths = {name: len(values) for name, values in rows.items()}
        if not lengths:
            return least
        name, count = next(iter(lengths.items()))
        for column, length in lengths.items():
            if length != count:
                raise UserError(
                    f"column {column!r}: {length} values where {name!r} has {count}; give as many"
                )
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
            raise UserError(
                f"row {number}: {brief(row)} is no object with columns; write it as name: value"
            )
        if source not in row:
            raise UserError(
                f"row {number}: no {source!r}; give None where there is none{suggest(source, row)}"
            )
    return [row[source] for row in rows]


def kind_of_value(value: Any, name: str, row: int, *, nested: bool = True) -> str:
    """Returns of what kind a value is; of a list, "list:" and that of its elements."""
    if value is None:
        return "null"
    if isinstance(value, (bool, np.bool_)):
        return "bool"
    if isinstance(value, (int, np.integer)):
        return "int" if -(2**63) <= int(value) < 2**63 else "text"
    if isinstance(value, str) and not _is_text(value):
        raise UserError(
            f"column {name!r}, row {row}: {value!r} is no text in UTF-8; write it as such, or null"
        )
    for types, kind in (
        ((float, np.floating), "float"),
        ((str, uuid.UUID), "text"),
        (bytes, "bytes"),
    ):
        if isinstance(value, types):
            return kind
    if isinstance(value, decimal.Decimal) and not value.is_infinite():
        return _kind_of_decimal(value)
    if nested and isinstance(value, (datetime.date, np.datetime64)):
        return "null" if value != value else "time"  # NaT, pandas' one too, is not itself
    if isinstance(value, (list, tuple, np.ndarray)) and nested:
        kinds = sorted({kind_of_value(x, name, row, nested=False) for x in value} - {"null"})
        if kinds and all(kind.startswith("decimal") for kind in kinds):
            kinds = [max(kinds, key=_places)]
        is_number = len(kinds) > 1 and all(
            kind in ("float", "int") or kind.startswith("decimal") for kind in kinds
        )
        if is_number and all(abs(x) <= 2**53 for x in value if x is not None and x == x):
            kinds = ["float"]
        return "list:" + (kinds[0] if len(kinds) == 1 else "text" if kinds else "null")
    remedy = "give a number, text, a time, a list of numbers or text, or null"
    raise UserError(f"column {name!r}, row {row}: {brief(value)} is no value; {remedy}")


def brief(value: object) -> str:
    """Returns how Python writes a value, in one line that is not long."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 100 else f"{text[:97]}..."


def _is_text(value: str) -> bool:
    """Returns whether UTF-8 can say a text; it cannot say half of a surrogate pair, which JSON may
    have.
    """
    try:
        value.encode()
    except UnicodeError:
        return False
    return True


def _kind_of_decimal(value: decimal.Decimal) -> str:
    """Returns "decimal:" and how many places it has, or another kind for one that Arrow's decimals
    cannot hold.
    """
    if value.is_nan():
        return "null"
    places = max(0, -int(value.as_tuple().exponent))
    if max(0, value.adjusted() + 1) + places <= _DIGITS:
        return f"decimal:{places}"
    return "text" if _is_whole(value) else "float"


def _places(kind: str) -> int:
    return int(kind.removeprefix("decimal:"))


def array_of(values: Mapping[int, Any], kind: str, name: str) -> pa.Array:
    """Returns a column's values of one kind as an array.

    Args:
        values: by their rows.
        kind: see `kind_of_value`.
        name: the column's, for errors.

    Raises:
        UserError: for a value beside others that it cannot stand beside. It names column and row.
    """
    inner = kind.removeprefix("list:")
    plain = []
    for row, value in values.items():
        try:
            plain.append(
                _plain(value, kind) if kind == inner else [_plain(x, inner) for x in value]
            )
        except UserError as error:
            raise UserError(f"column {name!r}, row {row}: {error}") from None
    inner_type = (
        pa.decimal256(_DIGITS, _places(inner)) if inner.startswith("decimal:") else _TYPES[inner]
    )
    return pa.array(plain, inner_type if kind == inner else pa.list_(inner_type))


def weights_of_value(value: Any, name: str, row: int) -> Any:
    """Returns the weights of a list as numbers of one type: floats, where one of them is.

    Raises:
        UserError: when some are numbers and others something else.
    """
    if not isinstance(value, (list, tuple, np.ndarray)):
        return value
    types = {type(x.item() if isinstance(x, np.generic) else x) for x in value if x is not None}
    if len(types) < 2 or types == {int, str}:
        return value
    with suppress(OverflowError):
        if types == {int, float}:
            return [None if x is None else float(x) for x in value]
    raise UserError(
        f"column {name!r}, row {row}: {brief(value)} are no weights; give each id one number"
    )


def _plain(value: Any, kind: str) -> Any:
    """Returns a value as Arrow takes it. Numbers among texts are written out, as they are
    hashed.
    """
    if kind in ("null", "time"):
        return _microseconds(value) if kind == "time" else None
    if isinstance(value, np.generic):
        value = value.item()
    is_decimal = isinstance(value, decimal.Decimal)
    if is_decimal and (kind == "float" or value.is_nan()):
        return None if value.is_nan() else float(value)
    if kind != "text" or value is None or isinstance(value, str):
        return value
    if is_decimal or isinstance(value, float):
        if value != value:
            return None
        is_id = _is_whole(value) if is_decimal else value.is_integer() and abs(value) <= 2**53
        if not is_id:
            raise UserError(f"{value!r} is not an id; write ids as integers or strings")
        return str(int(value))
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeError:
            raise UserError(
                f"{value!r} is no text in UTF-8 and stands beside text; give bytes alone"
            ) from None
    return str(value).lower() if isinstance(value, bool) else str(value)


def _is_whole(value: decimal.Decimal) -> bool:
    return value == value.to_integral_value()


def seconds_of_values(
    values: Sequence[Any], name: str, format: str | None, *, with_words: bool = False
) -> Int64s:
    """Returns the times of a column of a request in seconds since 1970, int64, without the missing
    ones.

    Args:
        values: they.
        name: the column's, for errors.
        format: of times in the log, see `as_times`.
        with_words: whether text may be a word for missing, see `sparrow.features.cells`.

    Raises:
        UserError: for a value that is no time.
    """
    kinds: dict[str, dict[int, Any]] = {}
    for row, value in enumerate(values):
        time = _iso_time(value) if isinstance(value, str) else value
        kinds.setdefault(kind_of_value(time, name, row), {})[row] = time
    seconds = [
        np.array(
            [_microseconds(time) // 10**6 for time in kinds.pop("time", {}).values()], np.int64
        )
    ]
    kinds.pop("null", None)
    for kind, times in kinds.items():  # Arrow takes longer than all else here
        array = array_of(times, kind, name)
        if with_words and kind == "text":
            array = spelt_integers(without_words(array).drop_null(), format)
        seconds.append(seconds_of(as_times(array, name, 0, format), unit_of(array.type, format)))
    return np.concatenate(seconds)


def read_iso(values: Sequence[Any], format: str | None) -> list[Any]:
    """Returns values with times in the place of text in ISO 8601, which a log may write otherwise.

    Args:
        values: of a column of times.
        format: of times in the log. Without one the log has ISO 8601, too, and texts stay.
    """
    if format is None:
        return list(values)
    return [_iso_time(value) if isinstance(value, str) else value for value in values]


def _iso_time(text: str) -> Any:
    """A time, or the text itself. No log's own format begins as ISO 8601 does and means something
    else.
    """
    if _ISO_DATE.match(text) is None:
        return text
    try:
        return datetime.datetime.fromisoformat(text.strip())
    except ValueError:
        return text


def _microseconds(time: Any) -> int:
    """Returns a time in microseconds since 1970. One without a zone is taken for UTC, and a date
    for its midnight.
    """
    if isinstance(time, np.datetime64):
        return int(time.astype("M8[us]").astype(np.int64))
    if not isinstance(time, datetime.datetime):
        time = datetime.datetime(time.year, time.month, time.day)
    if time.utcoffset() is None:
        time = time.replace(tzinfo=datetime.UTC)
    return int((time - _EPOCH) // datetime.timedelta(microseconds=1))


def lists_of_numbers(values: list[Any], size: int) -> Float64s | None:
    """Returns vectors as float64 [N, S], NaN where one is missing; None where one is anything but a
    list of numbers.
    """
    present = [i for i, value in enumerate(values) if value is not None]
    if not all(isinstance(values[i], (list, np.ndarray)) for i in present):
        return None
    try:
        with np.errstate(over="ignore"):
            lists = np.array([values[i] for i in present])
            if lists.dtype.kind not in "biuf":  # decimals are rounded as those of a log are
                return None
            x_MS = lists.astype(np.float64).astype(np.float32)
    except (ValueError, TypeError, OverflowError):
        return None
    if present and (x_MS.shape != (len(present), size) or not np.isfinite(x_MS).all()):
        return None
    x_NS = np.full((len(values), size), np.nan)
    if present:
        x_NS[present] = x_MS
    return x_NS
