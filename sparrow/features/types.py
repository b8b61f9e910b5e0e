"""Arrow's types: as what a column of each is read. This is the one place that says so, for every
door.

A type that is neither numbers, ids, times nor lists of these is left out: `read_as` gives None.
"""

from __future__ import annotations

import re

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

REMEDY = "write it as numbers, text or a list of these to have it read"
# others are read as what they are stored as
_EXTENSIONS = {"arrow.uuid": pa.string(), "arrow.bool8": pa.bool_()}
_DASHES = (8, 12, 16, 20)  # hexadecimal digits of a UUID before each dash


def is_list(kind: pa.DataType) -> bool:
    """Returns whether an arrow type is a list of any length."""
    return (
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )


def is_number(kind: pa.DataType) -> bool:
    """Returns whether an arrow type holds numbers."""
    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)


def is_nested(kind: pa.DataType) -> bool:
    """Returns whether an arrow type is a struct or a list of structs."""
    return pa.types.is_struct(kind.value_type if is_list(kind) else kind)


def is_unnamed(name: str) -> bool:
    """Returns whether a column's name is none: an empty one, or what pandas calls an index that has
    no name.
    """
    return re.fullmatch(r"|Unnamed: \d+(_level_\d+)?(\.\d+)?|__index_level_\d+__", name) is not None


def read_as(kind: pa.DataType) -> pa.DataType | None:
    """Returns the type that a column of an arrow type is read as; None for one that is left out.

    Dictionaries, runs and views are read as what they stand for. Structs stay: each of their fields
    is a column.
    """
    if isinstance(kind, pa.BaseExtensionType):
        return _EXTENSIONS.get(kind.extension_name) or read_as(kind.storage_type)
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return read_as(kind.value_type)
    if pa.types.is_fixed_size_binary(kind):
        return pa.binary()
    if kind in (pa.string_view(), pa.binary_view()):
        return pa.large_string() if kind == pa.string_view() else pa.large_binary()
    if pa.types.is_decimal(kind):
        # Arrow reads few small ones
        return pa.decimal128(38, kind.scale) if kind.bit_width < 128 else kind
    if pa.types.is_float16(kind):
        return pa.float32()
    if is_list(kind) or pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind):
        return _list_read_as(kind)
    if pa.types.is_struct(kind):
        return kind if kind.num_fields else None
    has_text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    has_bytes = pa.types.is_binary(kind) or pa.types.is_large_binary(kind)
    has_number = (
        pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    )
    has_time = pa.types.is_timestamp(kind) or pa.types.is_date(kind)
    return (
        kind if has_text or has_bytes or has_number or has_time or pa.types.is_null(kind) else None
    )


def as_read(column: pa.Array) -> pa.Array:
    """Returns a column [N] in the type that `read_as` gives, which must not be None."""
    kind = column.type
    to = read_as(kind)
    assert to is not None
    if to == kind:
        return column
    if isinstance(kind, pa.BaseExtensionType):
        return (
            _as_uuids(column.storage)
            if kind.extension_name == "arrow.uuid"
            else _stored(column).cast(to)
        )
    if pa.types.is_dictionary(kind):
        return as_read(column.dictionary).take(column.indices)
    if pa.types.is_run_end_encoded(kind):
        ends_R = column.run_ends.to_numpy()
        run_N = np.searchsorted(ends_R, column.offset + np.arange(len(column)), "right")
        return as_read(column.values).take(pa.array(run_N))
    if pa.types.is_list(to) or pa.types.is_large_list(to):
        lengths_N = pc.list_value_length(column).fill_null(0).to_numpy(zero_copy_only=False)
        offsets = pa.array(np.concatenate([[0], np.cumsum(lengths_N, dtype=np.int64)]))
        values = as_read(column.flatten()).cast(to.value_type)
        return pa.LargeListArray.from_arrays(offsets, values, mask=column.is_null())
    return column.cast(to)


def left_out(name: str, kind: pa.DataType) -> str:
    """Returns what is said of a column of a type that is not read."""
    return (
        f"column {name!r} is left out, as {kind} is neither a number, an id, a time nor a list of"
        f" these; {REMEDY}"
    )


def _list_read_as(kind: pa.DataType) -> pa.DataType | None:
    inner = read_as(kind.value_type)
    if inner is None or is_list(inner) or pa.types.is_timestamp(inner) or pa.types.is_date(inner):
        return None
    return kind if is_list(kind) and inner == kind.value_type else pa.large_list(inner)


def _stored(column: pa.ExtensionArray) -> pa.Array:
    return as_read(column.storage)


def _as_uuids(stored: pa.Array) -> pa.Array:
    """Returns UUIDs [N] of 16 bytes each as text, as they are written elsewhere."""
    data = b"".join(value or bytes(16) for value in stored.to_pylist())
    digits_ND = np.frombuffer(data.hex().encode(), np.uint8).reshape(len(stored), 32)
    texts_ND = np.insert(digits_ND, _DASHES, ord("-"), axis=1)
    offsets = np.arange(len(stored) + 1, dtype=np.int32) * texts_ND.shape[1]
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(texts_ND))]
    return pc.if_else(
        stored.is_valid(), pa.Array.from_buffers(pa.string(), len(stored), buffers), None
    )
