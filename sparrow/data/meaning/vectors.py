"""Which columns hold vectors, such as content embeddings, and how many numbers theirs have."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparrow.core.errors import UserError
from sparrow.data.logs.read import Log
from sparrow.features.cells import without_words
from sparrow.features.ids import is_text
from sparrow.features.numeric import without
from sparrow.features.schema import MOST_NUMBERS, Column, Schema
from sparrow.features.vectors import flat_vectors

_VALUES = 1000  # texts that are looked at
_SHORTEST = 4  # numbers of a text; fewer may be coordinates, a date or a price
_MOST = 0.95  # of the values: so many are alike
_SEPARATORS = (",", ";", "|")  # and white space
_NUMBER = r"^[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?$"


def vector_of(values: pa.Array, kind: pa.DataType) -> Column | None:
    """Returns the column that values [N] are if they look like vectors, else None.

    Lists do when they hold floats, two or more, always as many. Texts do when they are at least
    four numbers, always as many, and a number has a fraction. One in twenty may be broken, which
    stops the preparation or is repaired then.

    Args:
        values: lists or texts.
        kind: their type.
    """
    if (
        pa.types.is_nested(kind)
        and not pa.types.is_struct(kind)
        and pa.types.is_floating(kind.value_type)
    ):
        size = _common_size(values, None)
        return (
            None
            if size is None or size < 2
            else _column(size, None, f"{kind.value_type} lists of one length")
        )
    texts = values.drop_null()[:_VALUES] if is_text(kind) else values[:0]
    # white space is cut already
    texts = texts.filter(pc.greater(pc.binary_length(texts), 0)) if len(texts) else texts
    if (
        not len(texts)
        or not pc.any(pc.match_substring_regex(texts[:1], r"^[\s\[(]*[-+.\d]")).as_py()
    ):
        return None
    for separator in (*_SEPARATORS, None):
        size = _common_size(texts, separator)
        read = _numbers(texts, separator)
        if (
            size is not None
            and size >= _SHORTEST
            and pc.any(pc.match_substring_regex(read, r"[.eE]")).as_py()
        ):
            return _column(
                size, separator, "text, cut at " + (repr(separator) if separator else "white space")
            )
    return None


def separator_of(texts: pa.Array, size: int) -> str | None:
    """Returns what cuts most texts [N], none of them missing or empty, into so many numbers.

    None where white space does or nothing that is known, and for a size of 1.
    """
    separators = _SEPARATORS if size > 1 else ()
    return next(
        (s for s in separators if _common_size(texts, s) == size and len(_numbers(texts, s))), None
    )


def _numbers(texts: pa.Array, separator: str | None) -> pa.Array:
    """Returns the numbers of texts, none if more than `1 - _MOST` of what is cut is no number or
    one is missing.
    """
    numbers, _ = flat_vectors(texts, "", 0, separator)
    read = numbers.filter(pc.match_substring_regex(numbers, _NUMBER))
    return read if not numbers.null_count and len(read) >= _MOST * len(numbers) else read[:0]


def sized(schema: Schema, log: Log) -> Schema:
    """Returns the schema with the size of each vector: unless told, it is that of most among the
    log's first ones.

    Raises:
        UserError: for a column in which no vector was found.
    """
    unknown = [name for name in schema.of_kind("vector") if schema.columns[name].size is None]
    if not unknown:
        return schema
    columns = dict(schema.columns)
    sample = log.sample(_VALUES)
    is_spelt = log.source.has_words
    for name in unknown:
        column = columns[name]
        values = sample[column.source or name].combine_chunks()
        if is_spelt and is_text(values.type):
            values = without_words(values)
        values = without(values, column.missing, with_words=is_spelt) if column.missing else values
        _, offsets = flat_vectors(values, name, 0, column.separator)
        sizes = np.diff(offsets)
        if not sizes.any():
            remedy = f"set columns.{name}.size"
            raise UserError(
                f"columns.{name}: no vector in the first {len(values)} rows of {log.name}; {remedy}"
            )
        columns[name] = replace(column, size=int(np.bincount(sizes[sizes > 0]).argmax()))
    return replace(schema, columns=columns)


def _common_size(values: pa.Array, separator: str | None) -> int | None:
    """Returns how many numbers the vectors have, if `_MOST` have as many. Those that are empty are
    missing.
    """
    sizes = np.diff(flat_vectors(values, "", 0, separator)[1])
    sizes, counts = np.unique(sizes[sizes > 0], return_counts=True)
    if not len(sizes) or counts.max() < _MOST * counts.sum():
        return None
    size = int(sizes[counts.argmax()])
    return size if size <= MOST_NUMBERS else None


def _column(size: int, separator: str | None, reason: str) -> Column:
    return Column(
        kind="vector", size=size, separator=separator, note=f"a vector of {size} numbers: {reason}"
    )
