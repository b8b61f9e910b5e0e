"""Vector columns: as many numbers in each row, such as content embeddings. A row of one is its
float32s, as bytes.

Bytes because they are read and written as they are: 30 times faster than a list of Parquet's, and 5
times faster than a column for each number (docs/preparing.md).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparrow.core.arrays import Bools, Float32s, Float64s, Int64s
from sparrow.core.errors import UserError, first_line
from sparrow.features.ids import is_text
from sparrow.features.lists import flat_lists
from sparrow.features.numeric import misfits, transform

_BRACKETS = "[]() \t\r\n"
_DIGITS = 4  # bytes of a number


def as_vectors(
    column: pa.Array, name: str, row0: int, size: int, separator: str | None = None
) -> pa.Array:
    """Returns vectors [N] of float32, each as bytes, null where there is none. A list or a text of
    nothing is none.

    Args:
        column: lists of numbers, or text of them.
        name: the column's, for errors.
        row0: the log's row of the array's first entry, for errors.
        size: how many numbers a vector has.
        separator: what cuts text, see `sparrow.features.schema.Column`.

    Raises:
        UserError: for a vector of another size, and for a number that is missing, not finite or
            none. It names the row.
    """
    flat, offsets = flat_vectors(column, name, row0, separator)
    lengths_N = np.diff(offsets)
    unlike = np.flatnonzero((lengths_N != size) & (lengths_N != 0))
    if len(unlike):
        reason = (
            f"column {name!r}, row {row0 + unlike[0]}: a vector of {lengths_N[unlike[0]]} numbers"
        )
        raise UserError(f"{reason} where others have {size}; mend it or leave it blank")

    def wrong(i: int, fault: str) -> UserError:
        row = row0 + int(np.searchsorted(offsets, i, "right")) - 1
        remedy = "mend it, or leave the whole vector blank"
        return UserError(
            f"column {name!r}, row {row}: number {i % size} of the vector is {fault}; {remedy}"
        )

    try:
        x_M = flat.cast(pa.float32(), safe=False)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        if is_text(flat.type):
            first = misfits(flat, pa.float32())[0]
            raise wrong(first, f"{flat[first].as_py()!r}, which is no number") from None
        reason = f"column {name!r}: {column.type} where a vector is needed ({first_line(error)})"
        raise UserError(f"{reason}; make the column kind list or ignore") from None
    if x_M.null_count:
        raise wrong(pc.index(x_M.is_null(), True).as_py(), "missing")
    x_M = x_M.to_numpy(zero_copy_only=False)
    odd = np.flatnonzero(~np.isfinite(x_M))
    if len(odd):
        raise wrong(int(odd[0]), f"{flat[int(odd[0])].as_py()}, which is not finite")
    return packed(x_M.reshape(-1, size), lengths_N > 0)


def packed(x_MS: Float32s, present_N: Bools | None = None) -> pa.Array:
    """Returns vectors [N] as bytes. x_MS: those of the rows for which `present_N` is true; by
    default of all.
    """
    rows = len(x_MS) if present_N is None else len(present_N)
    mask = None
    if present_N is not None and len(x_MS) < rows:
        x_NS = np.zeros((rows, x_MS.shape[1]), np.float32)
        x_NS[present_N] = x_MS
        x_MS = x_NS
        mask = pa.array(present_N).buffers()[1]
    data = pa.py_buffer(np.ascontiguousarray(x_MS, "<f4"))
    return pa.Array.from_buffers(pa.binary(_DIGITS * x_MS.shape[1]), rows, [mask, data])


def unpacked(column: pa.Array) -> Float32s:
    """Returns vectors [N] of bytes as float32 [N, S]. What there is where a vector is missing is
    undefined.
    """
    size = column.type.byte_width // _DIGITS
    _, data = column.buffers()
    if data is None:
        return np.empty((0, size), np.float32)
    first = column.offset * size
    return np.frombuffer(data, "<f4")[first : first + len(column) * size].reshape(-1, size)


def numbers_of(column: pa.Array) -> Float64s:
    """Returns vectors [N] of bytes as float64 [N, S], NaN where one is missing."""
    x_NS = unpacked(column).astype(np.float64)
    if column.null_count:
        x_NS[column.is_null().to_numpy(zero_copy_only=False)] = np.nan
    return x_NS


def transform_vectors(
    column: pa.Array, kind: str | None, means: Sequence[float] | None, stds: Sequence[float] | None
) -> Float32s:
    """Returns float32 [N, S] for the model: each number as that of a numeric column, and 0 for a
    missing vector.

    Numbers are not clipped to the range of training: what is far from it is far in many numbers a
    little.

    Args:
        column: of bytes [N].
        kind: see `sparrow.features.schema.Column.transform`.
        means, stds: of each of the S numbers in training.
    """
    fitted = [
        None if moments is None else np.array(moments, np.float64) for moments in (means, stds)
    ]
    return transform(numbers_of(column), kind, *fitted)


def broken(column: pa.Array, name: str, size: int, separator: str | None) -> Bools:
    """Returns where `as_vectors` would refuse a vector, bool [N]. Its size and its numbers are
    looked at.

    Args, Raises: see `as_vectors`; of its errors only those that are of no row.
    """
    flat, offsets = flat_vectors(column, name, 0, separator)
    lengths_N = np.diff(offsets)
    if is_text(flat.type):
        odd = np.zeros(len(flat), np.bool_)
        odd[misfits(flat, pa.float32())] = True
        flat = pc.if_else(pa.array(odd), None, flat)
    x_M = flat.cast(pa.float32(), safe=False).fill_null(np.nan).to_numpy(zero_copy_only=False)
    broken_N = (
        np.bincount(
            np.repeat(np.arange(len(lengths_N)), lengths_N), ~np.isfinite(x_M), len(lengths_N)
        )
        > 0
    )
    return broken_N | ((lengths_N != size) & (lengths_N != 0))


def flat_vectors(
    column: pa.Array, name: str, row0: int, separator: str | None
) -> tuple[pa.Array, Int64s]:
    """Returns the numbers of all vectors [M], which may be text, and where those of each row begin
    and end [N + 1].

    Args, Raises: see `as_vectors`.
    """
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if not is_text(column.type):
        if not (pa.types.is_nested(column.type) or pa.types.is_null(column.type)):
            reason = f"column {name!r}: {column.type} where a vector is needed"
            raise UserError(f"{reason}; make the column kind numeric, categorical or ignore")
        return flat_lists(column, name, lambda i: row0 + i, None)
    # as numpy and torch print vectors
    text = pc.utf8_trim(column.cast(pa.large_string()), _BRACKETS)
    between = "," if separator == "json" else separator
    return flat_lists(text, name, lambda i: row0 + i, between)
