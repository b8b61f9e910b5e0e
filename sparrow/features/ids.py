"""Id columns with one id in a row, to the int64 ids that embedding tables take."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparrow.core.errors import UserError
from sparrow.features.cells import Tally, as_id_texts, trimmed
from sparrow.features.numeric import misfits


def as_ids(
    column: pa.Array,
    name: str,
    row_of: Callable[[int], int],
    present: Sequence[str] | None = None,
    tally: Tally | None = None,
) -> pa.Array:
    """Returns the ids of an arrow array [N] as int64, string or binary. Missing ones stay null.

    White space around text is no part of an id. Booleans become text. Whole floats count as
    integers (pandas makes 12.0 of 12 where others are missing), and so do whole decimals. Where
    there are integers of 2^63 and more, all become their decimal text, by which all integers are
    hashed.

    Args:
        column: the array.
        name: the column's, for errors.
        row_of: the log's row of an entry, for errors.
        present: words for missing that are ids, see `sparrow.features.cells.as_id_texts`. None: any
            text is itself.
        tally: see `as_id_texts`.

    Raises:
        UserError: for numbers with a fraction, for floats beyond 2^53, which may have lost digits,
            and for values that are no ids.
    """
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    kind = column.type
    if column.null_count == len(column):
        return pa.nulls(len(column), pa.int64())
    if pa.types.is_boolean(kind):
        return column.cast(pa.string())
    if is_text(kind):
        return trimmed(column) if present is None else as_id_texts(trimmed(column), present, tally)
    if pa.types.is_floating(kind):
        return _float_integers(column, name, row_of)
    if pa.types.is_decimal(kind) and kind.scale > 0:
        column = _decimal_integers(column, name, row_of)
        kind = column.type
    wide = kind == pa.uint64() or (pa.types.is_decimal(kind) and kind.scale == 0)
    if not (pa.types.is_integer(kind) or wide):
        _refuse(column, pc.index(column.is_valid(), True).as_py(), name, row_of)
    try:
        return column.cast(pa.int64())
    except pa.ArrowInvalid:
        return column.cast(pa.string())


def is_text(kind: pa.DataType) -> bool:
    """Returns whether an arrow type holds text or bytes."""
    text = (
        pa.types.is_string,
        pa.types.is_large_string,
        pa.types.is_binary,
        pa.types.is_large_binary,
    )
    return any(is_kind(kind) for is_kind in text)


def _float_integers(column: pa.Array, name: str, row_of: Callable[[int], int]) -> pa.Array:
    """Float32s as the integers they are; NaN is missing."""
    x_N = column.cast(pa.float64()).to_numpy(zero_copy_only=False)
    missing_N = np.isnan(x_N)
    bad = np.flatnonzero(~missing_N & ((x_N != np.round(x_N)) | (np.abs(x_N) > 2.0**53)))
    if len(bad):
        _refuse(column, int(bad[0]), name, row_of)
    return pa.array(np.where(missing_N, 0, x_N).astype(np.int64), mask=missing_N)


def _decimal_integers(column: pa.Array, name: str, row_of: Callable[[int], int]) -> pa.Array:
    """Decimals without a fraction, as such of no scale."""
    try:
        return column.cast(pa.decimal256(76 - column.type.scale, 0))
    except pa.ArrowInvalid:
        bad = misfits(column, pa.decimal256(76 - column.type.scale, 0))
        _refuse(column, bad[0], name, row_of)
        raise


def _refuse(column: pa.Array, i: int, name: str, row_of: Callable[[int], int]) -> None:
    remedy = "write ids as integers or strings, or make the column kind numeric"
    raise UserError(
        f"column {name!r}, row {row_of(i)}: {column[i].as_py()!r} ({column.type}) is not an id;"
        f" {remedy}"
    )
