"""Rows as callers have them, mappings, columns of arrays or a data frame -> lists of Python
values.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, ValuesView
from importlib import import_module
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
import pyarrow as pa
import torch

from sparrow.core.errors import UserError
from sparrow.features.types import as_read, left_out, read_as
from sparrow.kernels.encode import Rows
from sparrow.serving.values import brief, count_of

TAKES = "a list of mappings, columns of values, a pandas or polars data frame, or an arrow table"


@runtime_checkable
class _Stream(Protocol):
    """What Arrow can read: data frames, tables, and columns of these."""

    def __arrow_c_stream__(self, requested_schema: object = None) -> object: ...


def is_frame(rows: object) -> bool:
    """Returns whether rows are a data frame, or else nothing that rows can be: neither mappings nor
    columns.
    """
    if isinstance(rows, (list, Mapping)):
        return False
    several = isinstance(rows, (Sequence, Iterator, ValuesView, np.ndarray)) and not isinstance(
        rows, (str, bytes)
    )
    return not several or isinstance(rows, _Stream)


def stack_requests(parts: Sequence[Rows], sources: Collection[str] = ()) -> tuple[Rows, list[int]]:
    """Returns the rows of several requests as those of one, and how many each has. sources: see
    `as_lists`.
    """
    lists = [as_lists(rows, sources) for rows in parts]
    counts = [count_of(rows, 0) for rows in lists]
    if len(lists) == 1:
        return lists[0], counts
    columns = [rows for rows in lists if isinstance(rows, Mapping)]
    if len(columns) == len(lists) > 0 and all(rows.keys() == columns[0].keys() for rows in columns):
        names = columns[0]
        return {
            name: list(itertools.chain.from_iterable(rows[name] for rows in columns))
            for name in names
        }, counts
    row_lists = [_as_rows(rows) if isinstance(rows, Mapping) else rows for rows in lists]
    return list(itertools.chain.from_iterable(row_lists)), counts


def _as_rows(columns: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Returns a dict of lists as a list of dicts."""
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def pairs_of(requests: Any) -> list[tuple[Any, Any]]:
    """Returns user and candidates of each of several requests.

    Raises:
        UserError: for what is no list of such pairs.
    """
    if not isinstance(requests, (Sequence, Iterator)) or isinstance(requests, (str, bytes)):
        raise UserError(f"requests: {brief(requests)} is no list; give [(user, candidates), ...]")
    pairs = []
    for number, pair in enumerate(requests):
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise UserError(f"request {number}: {brief(pair)} is no pair; give (user, candidates)")
        pairs.append((pair[0], pair[1]))
    return pairs


def user_of(user: Any, number: int, sources: Collection[str]) -> Mapping[str, Any]:
    """Returns the columns of the user of a request, which may be a data frame of one row.

    Args:
        user: hers.
        number: of the request, for errors.
        sources: see `as_lists`.

    Raises:
        UserError: for anything else.
    """
    if isinstance(user, Mapping):
        return user
    if not isinstance(user, _Stream):
        raise UserError(
            f"request {number}: the user is {brief(user)}; give {{column: value}}, or a frame of"
            " one row"
        )
    columns = as_lists(user, sources)
    assert isinstance(columns, Mapping)
    if (count := count_of(columns, 0)) != 1:
        raise UserError(
            f"request {number}: a frame of {count} rows for one user; give one of one row"
        )
    return {name: values[0] for name, values in columns.items()}


def as_lists(rows: Any, sources: Collection[str] = ()) -> Rows:
    """Returns a request as a list of dicts or a dict of lists.

    Args:
        rows: mappings, columns of values, or a data frame, as `Scorer.score` takes them.
        sources: the columns that are read, of frames and of columns; () for all.

    Raises:
        UserError: for anything else, and for columns that cannot be read.
    """
    if is_frame(rows):
        return _frame_lists(rows, sources)
    if not isinstance(rows, Mapping):
        return rows if isinstance(rows, list) else list(rows)
    if isinstance(rows, dict) and all(isinstance(values, list) for values in rows.values()):
        return rows
    for name, values in rows.items():
        if isinstance(values, str) or not isinstance(values, Iterable):
            raise UserError(
                f"column {name!r}: {brief(values)} is not a list; write rows as [{{...}}], or lists"
                " of values"
            )
    is_read = {name: not sources or name in sources for name in rows}  # others may be of any type
    return {
        name: _list(values, name) if is_read[name] else list(values)
        for name, values in rows.items()
    }


def _list(values: Any, name: str) -> list[Any]:
    if isinstance(values, (pa.Array, pa.ChunkedArray, _Stream)):
        try:
            return _arrow_list(
                pa.chunked_array(values if isinstance(values, _Stream) else [values]), name
            )
        except pa.ArrowException:  # pandas columns of mixed types
            return list(cast(Any, values))
    # else those in nanoseconds would become integers
    if isinstance(values, np.ndarray) and values.dtype.kind == "M":
        return list(values.astype("M8[us]"))
    return list(values.tolist() if isinstance(values, (np.ndarray, torch.Tensor)) else values)


def _frame_lists(frame: Any, sources: Collection[str]) -> dict[str, list[Any]]:
    """Returns those columns of a frame that are read; of one without them another, which says how
    many rows it has.
    """
    frames: Any = import_module("sparrow.data.logs.frames")  # only who has a frame waits for it
    full_table = frames.as_table(frame, TAKES)
    table = frames.columns_read(full_table, sources)
    if not table.num_columns and full_table.num_columns:
        return {full_table.column_names[0]: [None] * full_table.num_rows}
    return {name: _arrow_list(table[name], name) for name in table.column_names}


def _arrow_list(column: pa.ChunkedArray, name: str) -> list[Any]:
    """Returns a column of Arrow as values of a request: what the transforms make of them is what
    they make of it.
    """
    if read_as(column.type) is None:
        raise UserError(left_out(name, column.type))
    array = as_read(column.combine_chunks())
    if pa.types.is_timestamp(array.type) or pa.types.is_date(array.type):
        return list(array.to_numpy(zero_copy_only=False).astype("M8[us]"))
    return list(array.to_pylist())
