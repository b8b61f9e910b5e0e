"""Id columns: single ids and lists of them, to the int64 ids that embedding tables take."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sparrow.core.errors import UserError
from sparrow.features.hashing import hash_ids

Int64s = npt.NDArray[np.int64]


def as_ids(column: pa.Array, name: str, row_of: Callable[[int], int]) -> pa.Array:
    """The ids of an arrow array [N] as int64, string or binary; missing ones stay null. Booleans become text.

    name, row_of: the column's name and the log's row of entry i, for errors. Raises UserError for numbers with a
    fraction type and for integers of 2^63 and more.
    """
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    kind = column.type
    if column.null_count == len(column):
        return pa.nulls(len(column), pa.int64())
    if pa.types.is_boolean(kind):
        return column.cast(pa.string())
    if is_text(kind):
        return column
    if not pa.types.is_integer(kind):
        i = pc.index(column.is_valid(), True).as_py()
        remedy = "write ids as integers or strings, or make the column kind numeric"
        raise UserError(f"column {name!r}, row {row_of(i)}: {column[i].as_py()!r} ({kind}) is not an id; {remedy}")
    if kind == pa.uint64():
        i = pc.index(pc.greater(column, pa.scalar((1 << 63) - 1, kind)), True).as_py()
        if i >= 0:
            remedy = "ids reach to 2^63 - 1; write larger ones as strings"
            raise UserError(f"column {name!r}, row {row_of(i)}: id {column[i].as_py()} does not fit; {remedy}")
    return column.cast(pa.int64())


def as_lists(column: pa.Array, name: str, row0: int, max_length: int | None) -> tuple[pa.Array, Int64s]:
    """The ids of a list column: flat ids as `as_ids` gives them [M], none missing, and offsets int64 [N + 1].

    Text counts as a list too, cut at white space (CSV has no other lists). A missing list is empty, missing elements
    are dropped, and then the last `max_length` ids are kept. row0: the log's row of the array's first entry.
    Raises UserError like `as_ids`, and when the column holds no lists.
    """
    if is_text(column.type):
        text = pc.utf8_trim_whitespace(column.cast(pa.large_string()))
        column = pc.utf8_split_whitespace(pc.if_else(pc.equal(text, ""), None, text))
    if pa.types.is_null(column.type):
        return pa.nulls(0, pa.int64()), np.zeros(len(column) + 1, np.int64)
    if pa.types.is_fixed_size_list(column.type):
        column = column.cast(pa.large_list(column.type.value_type))
    if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)):
        raise UserError(
            f"column {name!r}: {column.type} where the schema says list; make it kind categorical or numeric"
        )
    lengths = pc.list_value_length(column).fill_null(0).to_numpy(zero_copy_only=False)
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    values = as_ids(column.flatten(), name, lambda i: row0 + int(np.searchsorted(offsets, i, "right")) - 1)
    if values.null_count:
        kept_before = np.concatenate([[0], np.cumsum(values.is_valid().to_numpy(zero_copy_only=False))])
        offsets = kept_before[offsets]
        values = values.drop_null()
    if max_length is None or len(offsets) == 1 or np.diff(offsets).max() <= max_length:
        return values, offsets
    lengths = np.minimum(np.diff(offsets), max_length)
    kept = np.concatenate([[0], np.cumsum(lengths)])
    index = np.arange(kept[-1]) + np.repeat(offsets[1:] - kept[1:], lengths)
    return values.take(pa.array(index)), kept


def encode(ids: pa.Array, name: str, low: int | None, high: int | None) -> Int64s:
    """Ids int64 [N] of what `as_ids` gave: low..high become 1..high - low + 1 and the rest 0; or, without low, hashes.

    A missing id is 0 either way. Raises UserError when a range meets text that is no integer.
    """
    if low is None or high is None:
        return hash_ids(ids)
    if is_text(ids.type):
        try:
            ids = ids.cast(pa.int64())
        except pa.ArrowInvalid as error:
            remedy = "prepare the log with encoding = 'hash' for its table"
            raise UserError(f"column {name!r}: its table numbers integers, but {error}; {remedy}") from None
    values = ids.fill_null(low).to_numpy(zero_copy_only=False)
    known = (values >= low) & (values <= high) & ids.is_valid().to_numpy(zero_copy_only=False)
    return np.where(known, values - low + 1, 0)


def is_text(kind: pa.DataType) -> bool:
    """Whether an arrow type holds text or bytes."""
    text = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    return any(is_kind(kind) for is_kind in text)
