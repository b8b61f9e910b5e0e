"""Data frames -> the raw rows that a log of them has."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pyarrow as pa

from sparrow.core.errors import UserError, complaint
from sparrow.data.logs.read import shape_like
from sparrow.data.logs.tables import table_log
from sparrow.features.schema import Schema, Source

FRAMES = "a pandas or polars data frame, or an arrow table"


def as_table(frame: Any, takes: str = FRAMES) -> pa.Table:
    """Returns an arrow table of a data frame's columns.

    Args:
        frame: a pandas or polars data frame, an arrow table, or anything else that arrow can read.
        takes: what may be given, for errors.

    Raises:
        UserError: when it is no data frame.
    """
    try:
        table = pa.table(_spelt(frame))
    except (TypeError, ValueError, pa.ArrowException) as error:
        reason = complaint(error)
        kind = f"{type(frame).__module__}.{type(frame).__name__}"
        remedy = f"give {takes}"
        if isinstance(error, pa.ArrowException):  # pandas columns of mixed types: two sentences
            reason = "; ".join(map(str, error.args))
            remedy = "give each column values of one type"
        raise UserError(f"frame: a {kind} cannot be read ({reason}); {remedy}") from None
    return table.select(
        [i for i, name in enumerate(table.column_names) if not name.startswith("__index_level_")]
    )


def shape_rows_like(table: pa.Table, schema: Schema) -> pa.Table:
    """Returns the rows of a table as those of a schema's log were made, see `shape_like`.

    Raises:
        UserError: as `shape_like`.
    """
    log = shape_like(table_log(table, Source(cells=schema.source.cells)), schema.source, schema)
    return log.sample(2**62) if log.steps else table


def columns_read(table: pa.Table, names: Collection[str]) -> pa.Table:
    """Returns those of a table's columns that have some names, as a log reads them: each field of a
    struct is a column.

    Raises:
        UserError: for two columns of one name, for one of the names of a type that is not read, and
            for values that Arrow cannot convert.
    """
    log = table_log(table)
    if refusals := [refusal for name, refusal in log.left_out.items() if name in names]:
        raise UserError(refusals[0])
    return log.sample(2**62).select([name for name in log.types if name in names])


def _spelt(frame: Any) -> Any:
    """Returns a pandas frame with intervals, such as those of `pd.cut`, and periods as its CSV has
    them: as text.
    """
    if type(frame).__module__.split(".")[0] != "pandas" or getattr(frame, "ndim", 0) != 2:
        return frame
    for place, kind in enumerate(frame.dtypes):
        value_type = getattr(getattr(kind, "categories", None), "dtype", kind)
        if str(value_type).startswith(("interval", "period")):
            frame = frame.copy(deep=False)
            frame.isetitem(place, frame.iloc[:, place].astype(object).map(str, na_action="ignore"))
    return frame
