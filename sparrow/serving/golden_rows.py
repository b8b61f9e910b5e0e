"""The golden rows of a model folder, raw, by which it proves itself: a log's, and such as no log
has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from sparrow.core.errors import UserError, suggest
from sparrow.data.logs.read import open_like
from sparrow.data.logs.text_types import types_for
from sparrow.data.meaning.separators import require_separators
from sparrow.features.encodings import MISSING, UNKNOWN
from sparrow.features.ids import is_text
from sparrow.features.rows import batches
from sparrow.features.schema import Encoding
from sparrow.features.types import is_list
from sparrow.serving.requests import Encoder
from sparrow.serving.values import missing_together, python_rows
from sparrow.trained.scorer import Restored

ROWS = 256

Check = Literal["rows", "made"]


def choose_golden_rows(
    restored: Restored, log: Sequence[str | Path], check: Check = "rows"
) -> pa.Table:
    """Choose raw rows of a log to keep with a model: of each column a missing value, an unknown
    one, an empty list.

    Args:
        restored: the model.
        log: files of a raw log.
        check: "rows" keeps rows of the log. "made" draws each column apart: no person's row
            travels.

    Raises:
        UserError: when the log cannot be read, or has no rows.
    """
    schema = restored.schema
    raw = open_like(log, replace(schema.source, bad_rows="repair"), schema)
    require_separators(raw, schema)
    read = types_for(replace(schema, columns=schema.inputs, groups={}, cluster=None), raw)
    first = next(iter(raw.with_vectors(schema).batches(read)), None)
    if first is None or not first.num_rows:
        raise UserError(
            f"{raw.name}: no rows; give a log that has some, for those that are kept with the model"
        )
    sources = Encoder(restored.transforms, "reference").sources
    for name in sources:
        if name not in first.schema.names:
            raise UserError(
                f"{raw.name}: no column {name!r}, which the model"
                f" reads{suggest(name, first.schema.names)}"
            )
    table = pa.Table.from_batches([first]).select(list(sources))
    for at, field in enumerate(table.schema):
        # a row below lacks it, and Arrow could not read it again
        if pa.types.is_fixed_size_list(field.type):
            table = table.set_column(
                at, field.name, table[field.name].cast(pa.large_list(field.type.value_type))
            )
    if check == "made":
        generator = np.random.default_rng(0)
        weights = {
            c.source or n: c.weights
            for n, c in schema.columns.items()
            if c.weights not in (None, ":")
        }
        orders = {
            name: pa.array(generator.permutation(table.num_rows)) for name in table.column_names
        }
        for name, weights_column in weights.items():
            if weights_column:  # a list and its weights are one thing
                orders[weights_column] = orders[name]
        table = pa.table({name: table[name].take(orders[name]) for name in table.column_names})
    chosen = _find_telling_rows(restored, table)
    (first_row,) = python_rows(table.slice(0, 1))
    odd_rows = pa.Table.from_pylist(
        list(_make_odd_rows(restored, first_row, table)), schema=table.schema
    )
    left = ROWS - len(chosen) - odd_rows.num_rows
    spread = np.linspace(0, table.num_rows - 1, max(left, 0)).astype(np.int64)
    return pa.concat_tables([odd_rows, table.take(pa.array([*chosen, *spread.tolist()]))]).slice(
        0, ROWS
    )


def _find_telling_rows(restored: Restored, table: pa.Table) -> list[int]:
    """Returns rows that have what others do not: a missing and an unknown value of a column, its
    longest list.
    """
    (batch,) = batches(
        restored.schema, restored.transforms.transform(table, training=False), table.num_rows
    )
    rows: dict[int, None] = {}
    for name in restored.schema.sparse:
        ids = batch.ids[name]
        lengths = ids.lengths_B
        if restored.schema.columns[name].kind == "list":
            rows |= {int(lengths.argmax()): None, int(lengths.argmin()): None}
        row_N = ids.row_of_each()
        for number in (MISSING, UNKNOWN):
            rows |= dict.fromkeys(row_N[ids.values_N == number][:1].tolist())
    for place in restored.schema.places.values():
        x_B = batch.dense_BC[:, place.start]
        rows |= {int(x_B.argmax()): None, int(x_B.argmin()): None}
    return list(rows)


def _make_odd_rows(
    restored: Restored, row: dict[str, Any], table: pa.Table
) -> Iterator[dict[str, Any]]:
    """Yields a row with one column changed: missing, an id that nobody knows, an empty list, a long
    one.
    """
    together = missing_together(restored.schema)
    for name in (*restored.schema.dense, *restored.schema.sparse):
        column = restored.schema.columns[name]
        source = column.source or name
        if source not in row:  # it tells of another column
            continue
        kind = table.schema.field(source).type
        has_lists = is_list(kind) and column.kind == "list"
        nobody = _nobody(
            kind.value_type if has_lists else kind, restored.schema.encodings.get(str(column.table))
        )
        (group,) = (names for names in together if source in names)
        yield row | dict.fromkeys(group)
        if len(group) > 1:  # as many ids as weights
            continue
        if column.kind == "list" and not column.weights:
            longest = max(table[source].to_pylist(), key=lambda value: len(value or ()))
            if isinstance(longest, list):
                yield from (
                    {**row, source: ids} for ids in ([], longest * 4, [nobody, *longest[:1]])
                )
            elif isinstance(longest, str) and column.separator != "json":
                yield from (
                    row | {source: ""},
                    row | {source: (column.separator or " ").join([longest] * 4)},
                )
        if column.kind == "categorical" and not column.quantiles and not column.part:
            yield row | {source: nobody}


def _nobody(kind: pa.DataType, encoding: Encoding | None) -> Any:
    """Returns an id that hardly any log has, of a type; None where there is none."""
    if is_text(kind) and encoding is not None and encoding.kind != "range":
        return "an id that nobody knows"
    return (1 << (kind.bit_width - 1)) - 1 if pa.types.is_signed_integer(kind) else None
