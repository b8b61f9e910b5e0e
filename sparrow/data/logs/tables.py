"""Rows that have Arrow types of their own: tables in memory, and files of Parquet."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa

from sparrow.core.errors import UserError, complaint
from sparrow.data.logs.read import Log
from sparrow.data.shaping.conversion import repair_cells
from sparrow.data.shaping.steps import Types
from sparrow.features.schema import Source
from sparrow.features.types import REMEDY, as_read, left_out, read_as


def table_log(table: pa.Table, source: Source | None = None) -> Log:
    """Returns a log of the rows of a table in memory.

    Args:
        table: the rows.
        source: only its bad_rows, cells, candidates and joins are obeyed.

    Raises:
        UserError: for two columns of one name, for a column that cannot be read, and like
            `Log.shaped`.
    """
    names = table.column_names
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"the table: two columns are named {twice!r}; rename one")
    types, refused = types_read(table.schema, "the table")
    columns = [column_read(name, table[name]) for name in types]
    wanted = source or Source()
    beginning = pa.table(columns, names=list(types))
    read = Source(bad_rows=wanted.bad_rows, cells=wanted.cells)
    log = Log(
        files=(),
        source=read,
        columns=(),
        held=types,
        types=types,
        rows=table.num_rows,
        beginning=beginning,
    )
    return replace(log, left_out=refused).shaped(wanted)


def as_held(log: Log, batch: pa.RecordBatch, types: Types, file: str) -> pa.RecordBatch:
    """Returns a batch of Parquet or of a table in the log's types. Repairs its text if that is
    wanted.

    Args:
        log: the log.
        batch: the rows.
        types: the wanted columns.
        file: what the file, or the table, is called.
    """
    columns = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            column = as_read(column)
            columns[name] = column.cast(log.held[name]) if column.type != log.held[name] else column
        except pa.ArrowException as error:
            raise UserError(
                f"{file}: column {name!r}: {complaint(error)}; write all files alike"
            ) from None
    first = log.repairs.rows - (log.repairs.starts[-1] if log.repairs.starts else 0)
    log.repairs.rows += batch.num_rows
    batch = pa.RecordBatch.from_pydict(columns) if columns else batch
    if log.source.bad_rows == "repair":
        plain = {name: kind for name, kind in types.items() if not pa.types.is_nested(kind)}
        batch = repair_cells(file, batch, plain, first - 1, (), log.repairs, log.source)
    return batch


def types_read(schema: pa.Schema, where: str) -> tuple[dict[str, pa.DataType], dict[str, str]]:
    """Returns the columns' types as they are read, and what is said of those that are left out."""
    types: dict[str, pa.DataType] = {}
    refused: dict[str, str] = {}
    for field in schema:
        kind = read_as(field.type)
        if kind is None:
            refused[field.name] = f"{where}: {left_out(field.name, field.type)}"
        else:
            types[field.name] = kind
    return types, refused


def column_read(name: str, column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Returns a column of a table in the type that it is read as, which must not be left out.

    Raises:
        UserError: for values that Arrow cannot convert.
    """
    try:
        return pa.chunked_array([as_read(chunk) for chunk in column.chunks], read_as(column.type))
    except pa.ArrowException as error:
        raise UserError(
            f"the table: column {name!r} ({column.type}): {complaint(error)}; {REMEDY}"
        ) from None
