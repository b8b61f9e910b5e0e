"""Columns of lists: cells of text are cut, missing ids are dropped, and a list that repeats is read
once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pajson

from sparrow.core.arrays import Bools, Float32s, Int64s
from sparrow.core.errors import UserError, first_line
from sparrow.features.cells import Tally, without_words
from sparrow.features.ids import as_ids, is_text
from sparrow.features.schema import Column, weights_of
from sparrow.features.types import is_list

WORTH = 1.5  # rows for a run of equal lists, from which on the run is converted once and repeated
_JSON = r"""^\s*\[\s*(?:(?:ITEM)(?:\s*,\s*(?:ITEM))*)?\s*\]\s*$"""
# the last three are what Python writes
_BARE = r"""-?[0-9][0-9.eE+-]*|true|false|null|None|nan|NaN"""
_JSON_PLAIN = _JSON.replace("ITEM", _BARE + r"""|"[^",\\]*"|'[^',\\]*'""")
_JSON_ANY = _JSON.replace("ITEM", r""""(?:[^"\\]|\\.)*\"""")


def typed_lists(
    column: Column,
    name: str,
    sources: Sequence[pa.Array],
    row0: int,
    present: Sequence[str] | None,
    tally: Tally | None,
    coded: Callable[[pa.Array], pa.DictionaryArray],
) -> dict[str, pa.Array]:
    """Returns the coded lists of a column [N], and their weights beside them. A run of equal texts
    is cut once.

    Args:
        column: says how text is cut.
        name: the column's.
        sources: the raw lists, and weights that have a column.
        row0: the log's row of the first one, for errors.
        present, tally: see `as_lists`.
        coded: makes a dictionary array of ids.
    """

    def convert(arrays: Sequence[pa.Array], row_of: Callable[[int], int]) -> dict[str, pa.Array]:
        raw = arrays[0]
        weights = arrays[1] if len(arrays) > 1 else column.weights
        ids, offsets, w_M = as_lists(
            raw, name, row_of, column.max_length, column.separator, weights, present, tally
        )
        lists = {name: pa.LargeListArray.from_arrays(offsets, coded(ids))}
        if w_M is not None:
            lists[weights_of(name)] = pa.LargeListArray.from_arrays(offsets, pa.array(w_M))
        return lists

    begins_N = np.logical_or.reduce([_begins(source) for source in sources])
    first_R = np.flatnonzero(begins_N)
    if WORTH * len(first_R) > len(begins_N):
        return convert(sources, lambda i: row0 + i)
    runs = convert(
        [source.take(pa.array(first_R)) for source in sources], lambda i: row0 + int(first_R[i])
    )
    run_N = pa.array(np.cumsum(begins_N) - 1)
    return {key: values.take(run_N) for key, values in runs.items()}


def _begins(raw: pa.Array) -> Bools:
    """Returns where text [N] differs from the one before. What is not text counts as different
    everywhere.

    Such values are converted as fast as compared.
    """
    begins_N = np.ones(len(raw), np.bool_)
    if is_text(raw.type) and len(raw):
        following = raw.slice(1)
        before = raw.slice(0, len(raw) - 1)
        missing = pc.and_(following.is_null(), before.is_null())
        begins_N[1:] = ~pc.or_(pc.equal(following, before).fill_null(False), missing).to_numpy(
            zero_copy_only=False
        )
    return begins_N


def as_lists(
    column: pa.Array,
    name: str,
    row_of: Callable[[int], int],
    max_length: int | None,
    separator: str | None = None,
    weights: pa.Array | str | None = None,
    present: Sequence[str] | None = None,
    tally: Tally | None = None,
) -> tuple[pa.Array, Int64s, Float32s | None]:
    """Returns the ids of a list column, without the missing ones.

    Text is cut at `separator`; white space around ids and empty ids are dropped. A missing list is
    empty, missing elements are dropped, and then the last `max_length` ids are kept.

    Args:
        column: lists or text [N].
        name: the column's, for errors.
        row_of: the log's row of an entry, for errors.
        max_length: how many ids of a list are kept at most, or None for all.
        separator: what cuts text: white space when None, "json" for JSON arrays, or else this text.
        weights: None, or ":" where the text of an id ends in a colon and its weight, or an array
            [N] of as many numbers as there are ids, as lists or as text that is cut alike.
        present, tally: of ids and of a whole text, see `as_ids`.

    Returns:
        The flat ids as `as_ids` gives them [M], offsets int64 [N + 1], and weights float32 [M] or
        None.

    Raises:
        UserError: like `as_ids`, when the column holds no lists, and for weights that are missing
            or no numbers.
    """
    if present is not None and is_text(column.type):
        column = without_words(column, () if separator == "json" else present)
    flat, offsets = flat_lists(column, name, row_of, separator)

    def row_of_id(i: int) -> int:
        return row_of(int(np.searchsorted(offsets, i, "right")) - 1)

    w_M: Float32s | None = None
    if isinstance(weights, str):
        flat, w_M = _cut_weights(flat, name, row_of_id)
    elif weights is not None:
        if present is not None and is_text(weights.type):
            weights = without_words(weights)
        numbers, weight_offsets = flat_lists(weights, f"{name} (weights)", row_of, separator)
        unlike = np.flatnonzero(np.diff(weight_offsets) != np.diff(offsets))
        if len(unlike):
            id_count = int(np.diff(offsets)[unlike[0]])
            weight_count = int(np.diff(weight_offsets)[unlike[0]])
            remedy = "give each id one weight"
            raise UserError(
                f"column {name!r}, row {row_of(int(unlike[0]))}: {id_count} ids and"
                f" {weight_count} weights; {remedy}"
            )
        w_M = _as_weights(numbers, name, row_of_id)
    values = as_ids(flat, name, row_of_id, present, tally)
    if values.null_count:
        valid_M = values.is_valid().to_numpy(zero_copy_only=False)
        offsets = np.concatenate([[0], np.cumsum(valid_M)])[offsets]
        values = values.drop_null()
        w_M = None if w_M is None else w_M[valid_M]
    if max_length is None or len(offsets) == 1 or np.diff(offsets).max() <= max_length:
        return values, offsets, w_M
    lengths = np.minimum(np.diff(offsets), max_length)
    cut_offsets = np.concatenate([[0], np.cumsum(lengths)])
    index = np.arange(cut_offsets[-1]) + np.repeat(offsets[1:] - cut_offsets[1:], lengths)
    return values.take(pa.array(index)), cut_offsets, None if w_M is None else w_M[index]


def flat_lists(
    column: pa.Array, name: str, row_of: Callable[[int], int], separator: str | None
) -> tuple[pa.Array, Int64s]:
    """Returns the elements of a list column [M], text cut up first, and its offsets [N + 1].
    Missing lists are empty.

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
    if not is_list(column.type):
        raise UserError(
            f"column {name!r}: {column.type} where the schema says list; make it kind categorical"
            " or numeric"
        )
    lengths = pc.list_value_length(column).fill_null(0).to_numpy(zero_copy_only=False)
    return column.flatten(), np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


def _cut(
    column: pa.Array, name: str, row_of: Callable[[int], int], separator: str | None
) -> pa.Array:
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
    # with commas or escapes in strings: Arrow's JSON reader takes these
    irregular = text.filter(pc.invert(plain))
    bad = pc.index(pc.match_substring_regex(irregular, _JSON_ANY), False).as_py()
    if bad >= 0:
        row = row_of(pc.index(text, irregular[bad]).as_py())
        value = irregular[bad].as_py()
        value = value if len(value) <= 40 else value[:37] + "..."
        raise UserError(
            f"column {name!r}, row {row}: {value!r} is no flat JSON array of ids; mend it"
        )
    # else [] would have one empty element
    inner = _blank(pc.utf8_trim(pc.if_else(plain, text, None), "[] \t\r\n"))
    lists = pc.split_pattern(inner, ",")
    items = pc.utf8_trim_whitespace(lists.values)
    items = pc.if_else(
        pc.is_in(items, pa.array(["null", "None", "nan", "NaN"], items.type)), None, items
    )
    lists = _with_values(lists, _blank(pc.utf8_trim(items, "\"'")))
    if not len(irregular):
        return lists
    objects = pc.binary_join_element_wise('{"v":', irregular.cast(pa.string()), "}\n", "")
    lines = objects.buffers()[2]
    schema = pa.schema([("v", pa.list_(pa.string()))])
    try:
        read = pajson.read_json(
            pa.BufferReader(lines),
            read_options=pajson.ReadOptions(block_size=lines.size),
            parse_options=pajson.ParseOptions(explicit_schema=schema, newlines_in_values=True),
        )
    except pa.ArrowInvalid as error:
        raise UserError(
            f"column {name!r}: no flat JSON array of ids: {first_line(error)}; mend it"
        ) from None
    read_lists = pa.concat_arrays([lists, read["v"].combine_chunks().cast(lists.type)])
    place_N = np.arange(len(text))
    place_N[~plain.to_numpy(zero_copy_only=False)] = len(text) + np.arange(len(irregular))
    return read_lists.take(pa.array(place_N))


def _with_values(lists: pa.Array, values: pa.Array) -> pa.Array:
    """Lists with other values in the places of theirs."""
    offsets = lists.offsets
    if lists.null_count:
        offsets = pc.if_else(pa.concat_arrays([lists.is_null(), pa.array([False])]), None, offsets)
    return type(lists).from_arrays(offsets, values)


def _blank(text: pa.Array) -> pa.Array:
    return pc.if_else(pc.equal(text, ""), None, text)


def _cut_weights(
    flat: pa.Array, name: str, row_of: Callable[[int], int]
) -> tuple[pa.Array, Float32s]:
    """Text "id:weight" [M] as ids and weights."""
    if not is_text(flat.type):
        if not len(flat):
            return flat, np.empty(0, np.float32)
        raise UserError(
            f"column {name!r}: {flat.type} where weights = ':' needs text such as 'id:0.5'; leave"
            " it out"
        )
    parts = pc.extract_regex(flat, r"^\s*(?P<id>(?s:.*?))\s*:\s*(?P<weight>[^:]*)$")
    unlike = pc.index(pc.and_(flat.is_valid(), parts.is_null()), True).as_py()
    if unlike >= 0:
        place = f"column {name!r}, row {row_of(unlike)}"
        raise UserError(
            f"{place}: {flat[unlike].as_py()!r} has no weight; write all ids as id:weight"
        )
    # of missing ids, which are dropped
    weights = pc.if_else(flat.is_valid(), pc.struct_field(parts, 1), "0")
    return _blank(pc.struct_field(parts, 0)), _as_weights(weights, name, row_of)


def _as_weights(numbers: pa.Array, name: str, row_of: Callable[[int], int]) -> Float32s:
    try:
        w_M = numbers.cast(pa.float32(), safe=False).to_numpy(zero_copy_only=False)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise UserError(
            f"column {name!r}: a weight is no number ({first_line(error)}); mend it"
        ) from None
    bad = np.flatnonzero(~np.isfinite(w_M))
    if len(bad):
        place = f"column {name!r}, row {row_of(int(bad[0]))}"
        raise UserError(
            f"{place}: weight {numbers[int(bad[0])].as_py()!r} is not a finite number; mend it"
        )
    return w_M.astype(np.float32)
