"""When a row happened, as far as knowing ids goes: its moment, the time and the place in the log of
its request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from sparrow.core.arrays import Bools, Int64s
from sparrow.features.encodings import UNKNOWN
from sparrow.features.schema import Schema

MOST = 1000  # rows of a request: more rows of one time are cut, as a log may tell days only


@dataclass(frozen=True)
class Request:
    """The one that rows end with: its time, group and session, None where one is missing, and its
    first row.
    """

    key: tuple[int, ...] | None = None
    row0: int = 0

    def joins(self, following: Request) -> bool:
        """Returns whether the request `following`, with which rows begin, goes on with this one."""
        return self.key is not None and self.key == following.key


class Clock:
    """Tells the moments of rows that come in the log's order.

    Rows that stand side by side and are of one time, group and session are a request, and of one
    moment: what an id did in one of them says nothing about another that was shown with it. A log
    with none of these columns has a request for each row, and so have rows whose group or session
    is missing. last: the request before the first row.
    """

    def __init__(self, schema: Schema, last: Request | None = None) -> None:
        self.time = schema.role("time")
        named = [schema.role(kind) for kind in ("group", "session")]
        self.names = [name for name in named if name]
        self.last = last or Request()
        self.first: Request | None = None

    def moments(self, batch: pa.RecordBatch, row0: int) -> Int64s:
        """Returns the time and the place of each typed row's moment, int64 [2, N].

        Args:
            batch: the rows.
            row0: the log's row of the first one.
        """
        row_N = np.arange(row0, row0 + batch.num_rows)
        time_N = batch.column(self.time).to_numpy() if self.time else np.zeros_like(row_N)
        keys = np.stack([time_N, *(batch.column(name).to_numpy() for name in self.names)])
        if not len(row_N):
            return np.stack([time_N, row_N])
        alone_N: Bools = (
            np.any(keys[1:] <= 0, axis=0)
            if self.time or self.names
            else np.ones(len(row_N), np.bool_)
        )
        begins_N = np.append(True, (keys[:, 1:] != keys[:, :-1]).any(0)) | alone_N
        first = Request(None if alone_N[0] else tuple(keys[:, 0].tolist()), row0)
        begins_N[0] = not self.last.joins(first)
        start_N = np.maximum.accumulate(np.where(begins_N, row_N, self.last.row0))
        self.first = self.first or first
        self.last = Request(None if alone_N[-1] else tuple(keys[:, -1].tolist()), int(start_N[-1]))
        return np.stack([time_N, start_N + (row_N - start_N) // MOST * MOST])


def order_of(moments_2N: Int64s) -> tuple[Int64s, Int64s]:
    """Returns the distinct moments in their order.

    Returns:
        The moments, int64 [2, M], and the place of each row's moment among them, int64 [N].
    """
    time_N, place_N = moments_2N
    order = np.lexsort((place_N, time_N))
    sorted_2N = moments_2N[:, order]
    new_N = np.append(True, (sorted_2N[:, 1:] != sorted_2N[:, :-1]).any(0))[: len(order)]
    ordinal_N = np.empty(len(order), np.int64)
    ordinal_N[order] = np.cumsum(new_N) - 1
    return sorted_2N[:, new_N], ordinal_N


def hide(
    schema: Schema,
    table: pa.Table,
    since: Mapping[str, Int64s],
    moments_2N: Int64s,
    training_N: Bools,
) -> pa.Table:
    """Returns transformed rows [N] in which ids that training rows do not yet know are unknown.

    Args:
        schema: the fitted one.
        table: the rows.
        since: table -> the moment after which each of its table rows is known, int64 [2, R].
        moments_2N: the moment of each row.
        training_N: whether each row is for training.
    """
    if not training_N.any():
        return table
    for i, name in enumerate(table.column_names):
        since_2R = since.get(str(schema.columns[name].table)) if name in schema.columns else None
        if since_2R is None:
            continue
        (values,) = table[name].chunks or [table[name].combine_chunks()]
        is_list = pa.types.is_large_list(values.type)
        rows_M = (values.flatten() if is_list else values).to_numpy()
        lengths_N = values.value_lengths().to_numpy() if is_list else np.ones(len(values), np.int64)
        time_M, place_M = np.repeat(moments_2N, lengths_N, axis=1)
        training_M = np.repeat(training_N, lengths_N)
        time_R, place_R = since_2R
        since_M = time_R[rows_M]
        is_same_moment_M = (time_M == since_M) & (place_M <= place_R[rows_M])
        early_M = training_M & ((time_M < since_M) | is_same_moment_M)
        hidden = pa.array(np.where(early_M, np.array(UNKNOWN, rows_M.dtype), rows_M))
        if is_list:
            hidden = pa.LargeListArray.from_arrays(np.append(0, np.cumsum(lengths_N)), hidden)
        table = table.set_column(i, name, hidden)
    return table
