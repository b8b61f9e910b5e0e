"""A column of a model -> how it is encoded: by compiled code, or by the transforms of this column
alone.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa

from sparrow.features.cells import spelt_as_id
from sparrow.features.counts import by_row
from sparrow.features.encodings import FIRST, kind_of
from sparrow.features.schema import Schema, Source, missing_of
from sparrow.features.transforms import Transforms
from sparrow.kernels.encode import Column, Lookup


def base_of(schema: Schema, name: str) -> str:
    """Returns the column that a feature is read as: the one of which it tells whether it is
    missing, or itself.
    """
    is_mark = schema.columns[name].transform == "missing"
    return next(n for n in schema.dense if missing_of(n) == name) if is_mark else name


def column_of(transforms: Transforms, name: str) -> Column:
    """Returns how a column is encoded by compiled code."""
    schema = transforms.schema
    column = schema.columns[name]
    base = base_of(schema, name)
    if column.kind in ("numeric", "vector"):
        is_vector = schema.columns[base].kind == "vector"
        lookup = (
            Lookup("refused", numbers=np.empty(0, np.float64)) if is_vector else Lookup("number")
        )
        if schema.columns[base].counts:
            counted = transforms.counts[base]
            places = np.arange(len(transforms.counts[base].hashes_V))
            numbers_R = by_row(schema.columns[base], counted)
            lookup = Lookup("vocabulary", counted.hashes_V, places + FIRST, numbers=numbers_R)
    elif column.quantiles:
        lookup = Lookup("buckets", np.array(column.boundaries or (), np.float64))
    elif column.weights == ":" or column.part or column.cross:
        lookup = Lookup("refused")
    else:
        lookup = kind_of(schema.encodings[str(column.table)]).lookup(
            transforms.vocabularies.get(str(column.table))
        )
    read = schema.columns[base]
    missing = read.missing or ()
    if schema.source.has_words:
        missing = tuple(map(spelt_as_id, missing))
    return Column(
        source=read.source or base,
        lookup=lookup,
        is_list=column.kind == "list",
        weights=None if column.weights == ":" else column.weights,
        max_length=column.max_length,
        separator="" if column.separator == "json" else column.separator,
        missing=missing,
        missing_numbers=tuple(x for text in missing for x in _as_written(text)),
    )


def _as_written(text: str) -> list[float]:
    """Returns the float that Arrow writes so, if there is one."""
    try:
        number = float(text)
    except ValueError:
        return []
    return (
        [number] if pa.scalar(number, pa.float64()).cast(pa.large_string()).as_py() == text else []
    )


def transforms_of(transforms: Transforms, name: str) -> Transforms:
    """Returns the transforms of one column."""
    schema = transforms.schema
    name = base_of(schema, name)
    column = schema.columns[name]
    tables = {str(column.table)} & schema.encodings.keys()
    parts = {part: schema.columns[part] for part in column.cross or ()}
    tables |= {str(crossed.table) for crossed in parts.values()} & schema.encodings.keys()
    columns = {name: column, **parts}
    encodings = {table: schema.encodings[table] for table in tables}
    alone = Schema(columns=columns, encodings=encodings, source=Source(cells=schema.source.cells))
    return replace(
        transforms,
        schema=alone,
        vocabularies={
            t: transforms.vocabularies[t] for t in tables & transforms.vocabularies.keys()
        },
        counts={n: transforms.counts[n] for n in {name} & transforms.counts.keys()},
    )
