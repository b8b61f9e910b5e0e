"""Rows of a checkpoint that become other rows here: of other numbers, in another format, or cut
otherwise.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparrow.core import Chunk, UserError
from sparrow.embeddings.spec import Component
from sparrow.numerics.rounding import state_to_bf16

if TYPE_CHECKING:
    from sparrow.embeddings.records import RowRecords
    from sparrow.embeddings.stores import At

BLOCK = 1 << 16  # rows that are converted at a time


@torch.no_grad()
def load_rows(record: RowRecords, chunk: Chunk, to_N: Tensor, saved: Component) -> int:
    """Overwrite rows with those of a chunk. Returns how many values that were.

    Args:
        record: the rows.
        chunk: the row records.
        to_N: for each row of the chunk the component's row that it becomes, or less than 0 for
            none: int64 [N].
        saved: what the chunk was saved of, with the same rule. Other formats are rounded as this
            component says.

    Raises:
        UserError: when range or fields do not fit `saved`, or its columns do not fit the component.
    """
    if chunk.is_cache:
        load_frames(record, chunk, to_N[chunk.fields["row"] - chunk.rows[0]])
        return 0
    record.check(chunk, saved)
    is_here_N = (to_N >= record.first_row) & (to_N < record.first_row + record.rows)
    count = 0
    # in parts: random numbers are wider than rows
    for from_U in is_here_N.nonzero()[:, 0].split(BLOCK):
        to_U = to_N[from_U] - record.first_row
        saved_fields = {name: tensor[from_U] for name, tensor in chunk.fields.items()}
        fields = convert(record, saved_fields, saved, to_U, chunk.columns)
        part = replace(chunk, rows=(0, len(to_U)), fields=fields)
        count += record.put(part, to_U, slice(None), len(to_U))
    return count


def convert(
    record: RowRecords,
    saved_fields: dict[str, Tensor],
    saved: Component,
    rows_U: Tensor,
    columns: tuple[int, int],
    n_U: Tensor | int = 0,
) -> dict[str, Tensor]:
    """Returns the fields of some rows as a record stores them.

    Args:
        record: it.
        saved_fields: the fields as `saved` stores them.
        saved: a component with the same rule.
        rows_U: the rows here.
        columns: the first column and the one after the last.
        n_U: the number of the update for which they are rounded.
    """
    component = record.component
    dim = columns[1] - columns[0]
    fields = dict(saved_fields)
    if type(saved.format) is not type(component.format):
        values = saved.format.fields(dim)
        fields = {name: tensor for name, tensor in saved_fields.items() if name not in values}
        fields |= record.encode(saved.format.exact(saved_fields, dim), rows_U, columns, n_U)
    for number, name in enumerate(component.rule.fields(dim), 1):
        if saved.state != component.state:
            fields[name] = fields[name].float()
        if saved.state != component.state == "bf16":
            rows_R = rows_U + record.first_row
            fields[name] = state_to_bf16(fields[name], record.key, number, rows_R, columns, n_U)
    return fields


@torch.no_grad()
def load_frames(record: RowRecords, chunk: Chunk, rows_U: Tensor) -> None:
    """Take rows out of a saved cache. Those that find no frame here are rounded, with the number of
    their update.

    Args:
        record: the rows.
        chunk: the cache.
        rows_U: the rows that its rows become, int64 [U], or less than 0 for none.

    Raises:
        UserError: when the cache is cut by columns and a row cannot be.
    """
    component = record.component
    left = max(chunk.columns[0], record.columns[0])
    right = min(chunk.columns[1], record.columns[1])
    is_here_U = (rows_U >= record.first_row) & (rows_U < record.first_row + record.rows)
    if left >= right:
        return
    for name, field in component.fields.items():
        if why := field.uncut((left, right), component.dim):
            place = (
                f"table {component.name!r}: {name} {why}, and the cache that is loaded is cut by"
                " columns"
            )
            raise UserError(f"{place}; choose a row format that can be cut, such as fp16")
    rows_V = rows_U[is_here_U] - record.first_row
    fields = {
        name: tensor[is_here_U]
        for name, tensor in chunk.fields.items()
        if name not in ("batch", "counts")
    }
    exact_fields = component.in_frames.fields
    columns_there = slice(left - chunk.columns[0], right - chunk.columns[0])
    for name, field in exact_fields.items():
        fields[name] = field.part(fields[name], columns_there, chunk.columns[1] - chunk.columns[0])
    is_out_V = torch.ones(len(rows_V), dtype=torch.bool)
    if (left, right) == record.columns:
        is_out_V = record.store.restore(rows_V, fields, int(chunk.fields["batch"]))
    is_out_V &= fields["changed"] > 0  # the others are beneath as they are
    if not is_out_V.any():
        return
    record.rounded += int(is_out_V.sum())
    rows_V = rows_V[is_out_V]
    n_V = fields["changed"][is_out_V].long()
    exact = {name: fields[name][is_out_V] for name in exact_fields}
    rounded = convert(record, exact, component.in_frames, rows_V, (left, right), n_V)
    if right - left < record.dim:
        merge_parts(record, rounded, rows_V, right - left)
    record.store.write(rows_V, rounded, slice(left - record.columns[0], right - record.columns[0]))


def merge_parts(record: RowRecords, fields: dict[str, Tensor], rows: At, width: int) -> None:
    """Make one number a row of those that the column parts of the row keep, as `Field.across` says.

    A mean weighs the parts by their columns. It does not depend on their order. It is exact where
    the parts are equal, as counts of updates are.

    Args:
        record: the rows.
        fields: of a part. Its numbers become those of all parts so far.
        rows: which rows.
        width: how many columns the part has.
    """
    if record.merged_R is None:
        record.merged_R = torch.zeros(record.rows, dtype=torch.int32)
    stored = record.store.read(rows)
    before = record.merged_R[rows].to(stored["touched"].device)  # columns of these rows so far
    for name, field in record.component.fields.items():
        part = fields[name].to(before.device)
        if field.across == "max":
            fields[name] = torch.where(before == 0, part, torch.maximum(stored[name], part))
        elif field.across == "mean":
            mean = torch.lerp(stored[name].float(), part.float(), width / (before + width))
            fields[name] = torch.where(before == 0, part, mean.to(part.dtype))
    record.merged_R[rows] = (record.merged_R[rows] + width) % record.dim
    if not record.merged_R.any():
        record.merged_R = None
