"""Gradients of tables that every rank has: everyone's, added up rank by rank, so that all ranks
learn the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from sparrow.distributed import World
from sparrow.embeddings import RowGradients, RowRecords
from sparrow.embeddings.components import ComponentTables
from sparrow.embeddings.records import empty_gradients

PURPOSE = "gradients of copied tables"


def share(world: World, tables: ComponentTables) -> None:
    """Put everyone's gradients in the place of a rank's own: as they came, or summed; the sums have
    the same bits.

    Of each table travels what takes fewer bytes: the rows that each rank has used, to all; or the
    gradient of the whole table, summed like an all-reduce does it, a part on each rank, and
    gathered.
    """
    records = list(tables.all_records())
    by_name = tables.gradients()
    if not records:
        return
    local_gradients = [by_name.get(record.name) or empty_gradients(record) for record in records]
    counts = torch.tensor([len(gradients.rows_U) for gradients in local_gradients])
    counts_RT = torch.stack(world.all_gather("rows of copied tables, counts", counts, same=True))
    dense = [
        is_dense(world.size, table_counts, record)
        for table_counts, record in zip(counts_RT.T.tolist(), records, strict=True)
    ]
    tables.discard()
    entries = list(zip(range(len(records)), records, local_gradients, strict=True))
    _sum([entry for entry in entries if dense[entry[0]]], world, tables)
    rest = [entry for entry in entries if not dense[entry[0]]]
    if not rest:
        return
    counts_RT = counts_RT[:, ~torch.tensor(dense)]
    numbers_RT = counts_RT * torch.tensor([record.dim for _, record, _ in rest])
    rows_N = torch.cat([gradients.rows_U for *_, gradients in rest])
    grad_N = torch.cat([gradients.grad_UD.flatten() for *_, gradients in rest])
    rows = _to_all(world, "rows of copied tables", rows_N, counts_RT.sum(1).tolist())
    grads = _to_all(world, PURPOSE, grad_N, numbers_RT.sum(1).tolist())
    for rows_U, grad_M, sizes, numbers in zip(
        rows, grads, counts_RT.tolist(), numbers_RT.tolist(), strict=True
    ):
        for (number, record, _), part_U, part_M in zip(
            rest, rows_U.split(sizes), grad_M.split(numbers), strict=True
        ):
            if len(part_U):
                tables.collect(number, RowGradients(part_U, part_M.view(-1, record.dim)))


def _to_all(world: World, purpose: str, own_N: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
    """Every rank's tensor, of sizes that all know."""
    counts = [len(own_N)] * world.size
    begun = world.all_to_all_flat(purpose, own_N.repeat(world.size), counts, sizes)
    return begun.wait().split(list(sizes))


def is_dense(world: int, counts: Iterable[int], record: RowRecords) -> bool:
    """Returns whether all ranks together send fewer bytes for the whole table than for rows.

    Args:
        world: how many ranks there are.
        counts: how many rows each rank has used.
        record: the table's rows.
    """
    rows = record.rows
    dim = record.dim
    # both times world - 1
    return 2 * world * _part(rows, world) * 4 * (dim + 1) < sum(counts) * (8 + 4 * dim)


def _part(rows: int, world: int) -> int:
    return math.ceil(rows / world)


def _sum(
    chosen: Sequence[tuple[int, RowRecords, RowGradients]], world: World, tables: ComponentTables
) -> None:
    """Whole tables: part r of each, with a column that marks used rows, to rank r, which sums and
    gives it to all.
    """
    if not chosen:
        return
    sizes = []
    parts = []
    for _, record, gradients in chosen:
        part = _part(record.rows, world.size)
        dim = record.dim
        padded = gradients.grad_UD.new_zeros(part * world.size, dim + 1)
        padded[gradients.rows_U, :dim] = gradients.grad_UD
        padded[gradients.rows_U, dim] = 1
        parts.append(padded.view(world.size, -1))
        sizes.append(part * (dim + 1))
    counts = [sum(sizes)] * world.size
    begun = world.all_to_all_flat(PURPOSE, torch.cat(parts, 1).flatten(), counts, counts)
    received = begun.wait().view(world.size, -1)
    total = torch.zeros_like(received[0])
    for rank_part in received:
        total += rank_part
    sums = [part.split(sizes) for part in world.all_gather(PURPOSE, total, same=True)]
    for at, (number, record, _) in enumerate(chosen):
        table_sums = torch.cat([pieces[at].view(-1, record.dim + 1) for pieces in sums])
        rows_U = table_sums[:, -1].nonzero()[:, 0]
        if len(rows_U):
            tables.collect(number, RowGradients(rows_U, table_sums[rows_U, :-1].contiguous()))
