"""Which columns of a log a schema is made of, and as which type text is read for each."""

from __future__ import annotations

import pyarrow as pa

from sparrow.data.logs.read import Log
from sparrow.features.encodings import kind_of
from sparrow.features.schema import Column, Schema

# kinds that are read as numbers
_MEASURES = ("label", "numeric", "weight", "impressions", "baseline")


def types_for(schema: Schema, log: Log) -> dict[str, pa.DataType]:
    """Returns the log's columns that the schema needs, and the type that text is to be read as for
    each.

    Numbers are float64. Times that are not numbers are text. Ids are int64 for a table of encoding
    "range", and strings for "vocabulary" and "hash" (so "007" stays itself). While a table has no
    encoding yet, its ids are what the log's beginning suggests.

    Where cells have words (see `Source`), all but times is text, of which the transforms make what
    any other door's text becomes. Only what is to be repaired is read as what it is.
    """
    types: dict[str, pa.DataType] = {}
    for name, column in schema.columns.items():
        wanted = _wanted(schema, name, log)
        # else these cells are repaired as any that do not fit
        if column.missing and log.source.bad_rows == "stop":
            wanted = dict.fromkeys(wanted, pa.string())
        for source, kind in wanted.items():
            if column.kind == "ignore" or source not in log.types:
                continue
            if types.setdefault(source, kind) != kind:  # a column that serves twice
                types[source] = (
                    pa.string() if pa.string() in (kind, types[source]) else log.types[source]
                )
    return types


def _wanted(schema: Schema, name: str, log: Log) -> dict[str, pa.DataType | None]:
    """Returns the log's columns that one of the schema is made of, and the type that text is read
    as for each.
    """
    column = schema.columns[name]
    if column.cross:
        types: dict[str, pa.DataType | None] = {}
        for part in column.cross:
            types |= _wanted(schema, part, log)
        return types
    source, *further = schema.sources(name)
    kind = _text_type(column, schema, log, log.types.get(source))
    further_kind = kind if column.kind == "label" else pa.string()
    return {source: kind, **dict.fromkeys(further, further_kind)}


def _text_type(
    column: Column, schema: Schema, log: Log, kind: pa.DataType | None
) -> pa.DataType | None:
    encoding = schema.encodings[column.table] if column.table else None
    if encoding is None or encoding.kind is None or column.part is not None:
        integers = None
    else:
        integers = kind_of(encoding).takes_integers
    role = "group" if column.counts else column.kind  # both are ids that are hashed
    is_measured = integers or role in _MEASURES or column.quantiles is not None
    is_time = role == "time" or column.part is not None
    if log.source.has_words and not is_time and (log.source.bad_rows == "stop" or not is_measured):
        return pa.string()
    is_number = role in _MEASURES and (
        role != "label" or column.probability or schema.role("impressions")
    )
    if is_number or column.quantiles or column.threshold is not None:
        return pa.float64()
    single = ("categorical", "group", "session", "time", "ignore")
    if kind is None or (pa.types.is_floating(kind) and role in single):
        return kind  # pandas writes the id 12 as 12.0 where others are missing
    always = role in ("group", "session", "list", "vector", "ignore")
    if always or integers is False or pa.types.is_temporal(kind):
        return pa.string()
    return pa.int64() if integers else kind
