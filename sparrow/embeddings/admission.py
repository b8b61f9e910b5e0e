"""Rows of ids that come and go: an id gets a row when it is admitted, and its row begins with the
id's own values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparrow.kernels import philox

if TYPE_CHECKING:
    from sparrow.embeddings.records import RowRecords


def admit(record: RowRecords, keys_N: Tensor, now: int, batch: int, settled: int) -> Tensor:
    """Returns the rows of a batch's ids, some of whom get theirs now.

    Args:
        record: of a component with a policy.
        keys_N, now, batch, settled: see `row_index.admit`.
    """
    admitted = record.index.admit(keys_N, now, batch, settled)
    record.id_counts.update(admitted.counts)
    if admitted.counts["expired"]:
        record.store.write(admitted.freed_F, {"touched": torch.ones(1, dtype=torch.uint8)})
    if admitted.counts["admitted"]:
        begin_rows(record, admitted.begun_L, admitted.ids_L)
    return admitted.rows_N


def begin_rows(record: RowRecords, rows_L: Tensor, ids_L: Tensor) -> None:
    """Give rows the first values of the ids that get them. They depend on seed, table and id, not
    on the row.
    """
    values_LD = torch.empty(len(rows_L), record.dim)
    philox.uniform_(
        values_LD, record.key, record.component.init_scale, column=record.columns[0], rows_R=ids_L
    )
    # rounded as in the row of this number
    fields = record.encode(values_LD, ids_L - record.first_row, record.columns)
    record.store.write(rows_L, fields | _first_state(record))


def _first_state(record: RowRecords) -> dict[str, Tensor]:
    """Returns what rows that begin anew all have, as one row. What was in them before is gone:
    touched.
    """
    component = record.component
    fields = component.fields_of(record.dim)
    state = {"touched": torch.ones(1, dtype=torch.uint8)}
    for name in component.rule.fields(record.dim):
        state[name] = torch.full(
            fields[name].shape(1), fields[name].first, dtype=fields[name].dtype
        )
    return state
