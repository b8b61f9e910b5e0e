"""Id columns: single ids and lists of them, to the int64 ids that embedding tables take."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pajson

from sparrow.core.arrays import Float32s, Int64s
from sparrow.core.errors import UserError

_WHITE = " \t\n\v\f\r\x1c\x1d\x1e\x1f"
_JSON = r"""^\s*\[\s*(?:(?:ITEM)(?:\s*,\s*(?:ITEM))*)?\s*\]\s*$"""
_BARE = r"""-?[0-9][0-9.eE+-]*|true|false|null|None|nan|NaN"""  # the last three are what Python writes
_JSON_PLAIN = _JSON.replace("ITEM", _BARE + r"""|"[^",\\]*"|'[^',\\]*'""")
_JSON_ANY = _JSON.replace("ITEM", r""""(?:[^"\\]|\\.)*\"""")


def as_ids(column: pa.Array, name: str, row_of: Callable[[int], int]) -> pa.Array:
    """Returns the ids of an arrow array [N] as int64, string or binary. Missing ones stay null.

    White space around text is no part of an id. Booleans become text. Whole floats count as integers (pandas makes 12.0
    of 12 where others are missing). Where there are integers of 2^63 and more, all become their decimal text, by which
    all integers are hashed.

    Args:
        column: the array.
        name: the column's, for errors.
        row_of: the log's row of an entry, for errors.

    Raises:
        UserError: for numbers with a fraction, for floats beyond 2^53, which may have lost digits, and for values that
            are no ids.
    """
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    kind = column.type
    if column.null_count == len(column):
        return pa.nulls(len(column), pa.int64())
    if pa.types.is_boolean(kind):
        return column.cast(pa.string())
    if is_text(kind):
        return trimmed(column)
    if pa.types.is_floating(kind):
        return _whole(column, name, row_of)
    wide = kind == pa.uint64() or (pa.types.is_decimal(kind) and kind.scale == 0)
    if not (pa.types.is_integer(kind) or wide):
        _refuse(column, pc.index(column.is_valid(), True).as_py(), name, row_of)
    try:
        return column.cast(pa.int64())
    except pa.ArrowInvalid:
        return column.cast(pa.string())


def as_lists(
    column: pa.Array,
    name: str,
    row_of: Callable[[int], int],
    max_length: int | None,
    separator: str | None = None,
    weights: pa.Array | str | None = None,
) -> tuple[pa.Array, Int64s, Float32s | None]:
    """Returns the ids of a list column, without the missing ones.

    Text is cut at `separator`; white space around ids and empty ids are dropped. A missing list is empty, missing
    elements are dropped, and then the last `max_length` ids are kept.

    Args:
        column: lists or text [N].
        name: the column's, for errors.
        row_of: the log's row of an entry, for errors.
        max_length: how many ids of a list are kept at most, or None for all.
        separator: what cuts text: white space when None, "json" for JSON arrays, or else this text.
        weights: None, or ":" where the text of an id ends in a colon and its weight, or an array [N] of as many numbers
            as there are ids, as lists or as text that is cut alike.

    Returns:
        The flat ids as `as_ids` gives them [M], offsets int64 [N + 1], and weights float32 [M] or None.

    Raises:
        UserError: like `as_ids`, when the column holds no lists, and for weights that are missing or no numbers.
    """
    flat, offsets = flat_lists(column, name, row_of, separator)

    def row_of_id(i: int) -> int:
        return row_of(int(np.searchsorted(offsets, i, "right")) - 1)

    w_M: Float32s | None = None
    if isinstance(weights, str):
        flat, w_M = _cut_weights(flat, name, row_of_id)
    elif weights is not None:
        numbers, theirs = flat_lists(weights, f"{name} (weights)", row_of, separator)
        unlike = np.flatnonzero(np.diff(theirs) != np.diff(offsets))
        if len(unlike):
            ids, others = (int(np.diff(x)[unlike[0]]) for x in (offsets, theirs))
            remedy = "give each id one weight"
            raise UserError(f"column {name!r}, row {row_of(int(unlike[0]))}: {ids} ids and {others} weights; {remedy}")
        w_M = _as_weights(numbers, name, row_of_id)
    values = as_ids(flat, name, row_of_id)
    if values.null_count:
        valid_M = values.is_valid().to_numpy(zero_copy_only=False)
        offsets = np.concatenate([[0], np.cumsum(valid_M)])[offsets]
        values, w_M = values.drop_null(), None if w_M is None else w_M[valid_M]
    if max_length is None or len(offsets) == 1 or np.diff(offsets).max() <= max_length:
        return values, offsets, w_M
    lengths = np.minimum(np.diff(offsets), max_length)
    kept = np.concatenate([[0], np.cumsum(lengths)])
    index = np.arange(kept[-1]) + np.repeat(offsets[1:] - kept[1:], lengths)
    return values.take(pa.array(index)), kept, None if w_M is None else w_M[index]


def trimmed(texts: pa.Array) -> pa.Array:
    """Returns text [N] without the white space of ASCII around it. Bytes stay as they are."""
    if not len(texts) or pa.types.is_binary(texts.type) or pa.types.is_large_binary(texts.type):
        return texts
    _, offsets, data = texts.buffers()
    bounds = np.frombuffer(offsets, np.int64 if pa.types.is_large_string(texts.type) else np.int32)
    first, last = bounds[texts.offset], bounds[texts.offset + len(texts)]
    has_white = np.frombuffer(data or b"", np.uint8)[first:last].min(initial=255) <= ord(" ")  # told fast
    return pc.ascii_trim(texts, _WHITE) if has_white else texts


def flat_lists(
    column: pa.Array, name: str, row_of: Callable[[int], int], separator: str | None
) -> tuple[pa.Array, Int64s]:
    """Returns the elements of a list column [M], text cut up first, and its offsets [N + 1]. Missing lists are empty.

    Args:
        column: lists or text [N].
        name: the column's, for errors.
        row_of: the log's row of an entry, for errors.
        separator: see `as_lists`.

    Raises:
        UserError: when the column holds no lists.
    """
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if is_text(column.type):
        column = _cut(column, name, row_of, separator)
    if pa.types.is_null(column.type):
        return pa.nulls(0, pa.int64()), np.zeros(len(column) + 1, np.int64)
    if pa.types.is_fixed_size_list(column.type):
        column = column.cast(pa.large_list(column.type.value_type))
    if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)):
        raise UserError(
            f"column {name!r}: {column.type} where the schema says list; make it kind categorical or numeric"
        )
    lengths = pc.list_value_length(column).fill_null(0).to_numpy(zero_copy_only=False)
    return column.flatten(), np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


def is_text(kind: pa.DataType) -> bool:
    """Returns whether an arrow type holds text or bytes."""
    text = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    return any(is_kind(kind) for is_kind in text)


def _whole(column: pa.Array, name: str, row_of: Callable[[int], int]) -> pa.Array:
    """Float32s as the integers they are; NaN is missing."""
    x_N = column.cast(pa.float64()).to_numpy(zero_copy_only=False)
    missing_N = np.isnan(x_N)
    bad = np.flatnonzero(~missing_N & ((x_N != np.round(x_N)) | (np.abs(x_N) > 2.0**53)))
    if len(bad):
        _refuse(column, int(bad[0]), name, row_of)
    return pa.array(np.where(missing_N, 0, x_N).astype(np.int64), mask=missing_N)


def _refuse(column: pa.Array, i: int, name: str, row_of: Callable[[int], int]) -> None:
    remedy = "write ids as integers or strings, or make the column kind numeric"
    raise UserError(f"column {name!r}, row {row_of(i)}: {column[i].as_py()!r} ({column.type}) is not an id; {remedy}")


def _cut(column: pa.Array, name: str, row_of: Callable[[int], int], separator: str | None) -> pa.Array:
    """Text [N] as lists of text, missing where there is none."""
    text = pc.utf8_trim_whitespace(column.cast(pa.large_string()))
    text = pc.if_else(pc.equal(text, ""), None, text)
    if separator is None:
        return pc.utf8_split_whitespace(text)
    if separator == "json":
        return _cut_json(text, name, row_of)
    lists = pc.split_pattern(text, separator)
    return _with_values(lists, _blank(pc.utf8_trim_whitespace(lists.values)))


def _cut_json(text: pa.Array, name: str, row_of: Callable[[int], int]) -> pa.Array:
    """Flat JSON arrays of numbers or strings; also as Python prints lists of them."""
    plain = pc.match_substring_regex(text, _JSON_PLAIN).fill_null(True)
    others = text.filter(pc.invert(plain))  # with commas or escapes in strings: Arrow's JSON reader takes these
    bad = pc.index(pc.match_substring_regex(others, _JSON_ANY), False).as_py()
    if bad >= 0:
        row, value = row_of(pc.index(text, others[bad]).as_py()), others[bad].as_py()
        value = value if len(value) <= 40 else value[:37] + "..."
        raise UserError(f"column {name!r}, row {row}: {value!r} is no flat JSON array of ids; mend it")
    lists = pc.split_pattern(pc.utf8_trim(pc.if_else(plain, text, None), "[] \t\r\n"), ",")
    items = pc.utf8_trim_whitespace(lists.values)
    items = pc.if_else(pc.is_in(items, pa.array(["null", "None", "nan", "NaN"], items.type)), None, items)
    lists = _with_values(lists, _blank(pc.utf8_trim(items, "\"'")))
    if not len(others):
        return lists
    lines = pc.binary_join_element_wise('{"v":', others.cast(pa.string()), "}\n", "").buffers()[2]
    schema = pa.schema([("v", pa.list_(pa.string()))])
    try:
        read = pajson.read_json(
            pa.BufferReader(lines),
            read_options=pajson.ReadOptions(block_size=lines.size),
            parse_options=pajson.ParseOptions(explicit_schema=schema, newlines_in_values=True),
        )
    except pa.ArrowInvalid as error:
        raise UserError(f"column {name!r}: no flat JSON array of ids: {str(error).splitlines()[0]}; mend it") from None
    both = pa.concat_arrays([lists, read["v"].combine_chunks().cast(lists.type)])
    place_N = np.arange(len(text))
    place_N[~plain.to_numpy(zero_copy_only=False)] = len(text) + np.arange(len(others))
    return both.take(pa.array(place_N))


def _with_values(lists: pa.Array, values: pa.Array) -> pa.Array:
    """Lists with other values in the places of theirs."""
    offsets = lists.offsets
    if lists.null_count:
        offsets = pc.if_else(pa.concat_arrays([lists.is_null(), pa.array([False])]), None, offsets)
    return type(lists).from_arrays(offsets, values)


def _blank(text: pa.Array) -> pa.Array:
    return pc.if_else(pc.equal(text, ""), None, text)


def _cut_weights(flat: pa.Array, name: str, row_of: Callable[[int], int]) -> tuple[pa.Array, Float32s]:
    """Text "id:weight" [M] as ids and weights."""
    if not is_text(flat.type):
        if not len(flat):
            return flat, np.empty(0, np.float32)
        raise UserError(f"column {name!r}: {flat.type} where weights = ':' needs text such as 'id:0.5'; leave it out")
    parts = pc.extract_regex(flat, r"^\s*(?P<id>(?s:.*?))\s*:\s*(?P<weight>[^:]*)$")
    unlike = pc.index(pc.and_(flat.is_valid(), parts.is_null()), True).as_py()
    if unlike >= 0:
        place = f"column {name!r}, row {row_of(unlike)}"
        raise UserError(f"{place}: {flat[unlike].as_py()!r} has no weight; write all ids as id:weight")
    weights = pc.if_else(flat.is_valid(), pc.struct_field(parts, 1), "0")  # of missing ids, which are dropped
    return _blank(pc.struct_field(parts, 0)), _as_weights(weights, name, row_of)


def _as_weights(numbers: pa.Array, name: str, row_of: Callable[[int], int]) -> Float32s:
    try:
        w_M = numbers.cast(pa.float32(), safe=False).to_numpy(zero_copy_only=False)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        words = str(error).splitlines()[0]
        raise UserError(f"column {name!r}: a weight is no number ({words}); mend it") from None
    bad = np.flatnonzero(~np.isfinite(w_M))
    if len(bad):
        place = f"column {name!r}, row {row_of(int(bad[0]))}"
        raise UserError(f"{place}: weight {numbers[int(bad[0])].as_py()!r} is not a finite number; mend it")
    return w_M.astype(np.float32)
