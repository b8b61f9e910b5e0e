"""The operators on a GPU, with the signatures of the reference: what the host does around the
kernels in `gpu/`.

Tables for which kernels are compiled alike are a group (`gpu/groups.py`), and a group is one
launch. Nothing here waits for the device, but for `row_gradients`, whose results have a size that
the device knows. What lies outside a table or outside the bags is left out there: it reads and
writes nothing. On a CPU it is refused first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, chain
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from sparrow.kernels.embedding_bag import reference
from sparrow.kernels.embedding_bag.arguments import Bags, Tables
from sparrow.kernels.embedding_bag.gpu import CODECS, updates
from sparrow.kernels.embedding_bag.gpu import bags as reading
from sparrow.kernels.embedding_bag.gpu.entries import (
    Entries,
    Source,
    gradients_of_bags,
    sorted_entries,
)
from sparrow.kernels.embedding_bag.gpu.features import alignment, columns_of, numbers_of
from sparrow.kernels.embedding_bag.gpu.groups import Group, groups_of
from sparrow.kernels.embedding_bag.gpu.launch import SIZE, blocks, launch, numbers

BLOCK = 128  # gradients of a row that are summed at a time


def knows(tables: Tables) -> bool:
    """Returns whether these kernels have a codec for every row format."""
    return all(level.format.cpp() in CODECS for level in tables.levels)


def lookup(tables: Tables, bags: Bags) -> list[Tensor]:
    """See `reference.lookup`. The vectors of shared bags are made once, then copied to their
    samples.
    """
    reference.check(tables, bags, [table.slots for table in tables])
    bags, device = _together(bags), bags.slots_N.device
    out = [torch.empty(shape, device=device) for shape in bags.outputs(tables.dims)]
    for group in groups_of(tables, "values"):
        features = [f for f in bags.lookups if f.table in group.members]
        begins = [0, *accumulate(bags.bags[f.key] if f.inverse >= 0 else 0 for f in features)]
        stored_BD = torch.empty(begins[-1], group.kind.D, device=device)
        rows, copies = [], []
        for f, begin in zip(features, begins[:-1], strict=True):
            vectors = columns_of(out[f.output], f.column)
            if f.inverse >= 0:
                inverse_B, stored = bags.inverses[f.inverse], columns_of(stored_BD[begin:], 0)
                copies.append(
                    [stored[0], inverse_B.data_ptr(), inverse_B.numel(), bags.bags[f.key], *vectors]
                )
                vectors = stored
            rows.append(numbers_of(bags, f, group.members.index(f.table), vectors))
        _read(reading.lookup, rows, group, bags, bags.weights_N)
        grid = [blocks(max((copy[2] for copy in copies), default=0), group.kind.ROWS), len(copies)]
        align = alignment(chain.from_iterable((at, to, stride) for at, *_, to, stride in copies))
        launch(
            reading.expand, grid, device, numbers(copies, device), OUT_ALIGN=align, OF=group.size
        )
    return out


def row_gradients(
    tables: Tables, grads: Sequence[Tensor], bags: Bags
) -> list[tuple[Tensor, Tensor]]:
    """See `reference.row_gradients`, with blocks of `BLOCK`. It waits for the device once."""
    limits, groups = [table.rows for table in tables], groups_of(tables, "dims")
    reference.check(tables, bags, limits, grads)
    entries, alive = _entries(grads, bags, limits, groups)
    ordered, device = entries.sorted, bags.slots_N.device
    used = [number for number, (low, high) in enumerate(entries.ranges) if low < high]
    ends = numbers([[low, high - 1] for low, high in entries.ranges if low < high], device)
    known = (
        torch.stack([ordered.ranks[ends], ordered.keys[ends].long()], 1).view(-1, 4).tolist()
    )  # waits
    segments = {
        number: (first, last + 1, key)
        for number, (first, _, last, key) in zip(used, known, strict=True)
    }
    none = [torch.empty(0, dim, device=device) for dim in tables.dims]
    gradients = [(torch.empty(0, dtype=torch.int64, device=device), grad_UD) for grad_UD in none]
    for group in groups:
        members = [number for number in group.members if number in segments]
        if not members:
            continue
        begin, end = segments[members[0]][0], segments[members[-1]][1]
        grad_UD = torch.empty(end - begin, group.kind.D, device=device)
        entries.sum_rows(group, grad_UD)
        for number in members:
            first, last, key = segments[number]
            last -= key == entries.bases[number] + limits[number]  # what is outside the table
            rows_U = ordered.keys[ordered.starts[first:last]].long() - entries.bases[number]
            gradients[number] = rows_U, grad_UD[first - begin : last - begin]
    del alive
    return gradients


def weight_gradients(tables: Tables, grads: Sequence[Tensor], bags: Bags) -> Tensor:
    """See `reference.weight_gradients`. Features that share a key take turns."""
    reference.check(tables, bags, [table.slots for table in tables], grads)
    bags, grads, groups = _together(bags), _sides(grads), groups_of(tables, "values")
    vectors, alive = gradients_of_bags(grads, bags, groups, BLOCK)
    grad_N = torch.zeros(bags.slots_N.numel(), device=bags.slots_N.device)
    turns = [
        sum(f.key == before.key for before in bags.lookups[:i]) for i, f in enumerate(bags.lookups)
    ]
    for turn in range(max(turns, default=-1) + 1):
        for group in groups:
            features = [
                i
                for i, f in enumerate(bags.lookups)
                if turns[i] == turn and f.table in group.members
            ]
            tables_of = [group.members.index(bags.lookups[i].table) for i in features]
            rows = [
                numbers_of(bags, bags.lookups[i], t, vectors[i])
                for i, t in zip(features, tables_of, strict=True)
            ]
            _read(reading.dots, rows, group, bags, grad_N)
    del alive
    return grad_N


def update_rows(
    tables: Tables, gradients: Sequence[tuple[Tensor, Tensor]], lr_T: Tensor, n: Tensor | int
) -> None:
    """See `reference.update_rows`."""
    reference.check_rows(tables, gradients)
    contiguous = [(rows_U.contiguous(), grad_UD.contiguous()) for rows_U, grad_UD in gradients]
    for group in groups_of(tables, "rows"):
        device = group.numbers.device
        members = [(place, *contiguous[number]) for place, number in enumerate(group.members)]
        rows = [
            [place, r.data_ptr(), r.numel(), *columns_of(grad, 0)] for place, r, grad in members
        ]
        grid = [blocks(max(row[2] for row in rows), group.kind.ROWS), len(rows)]
        arguments = (numbers(rows, device), group.numbers, *_on_device(lr_T, n, device))
        align = alignment(chain.from_iterable(row[3:] for row in rows))
        launch(updates.update_rows, grid, device, *arguments, GRAD_ALIGN=align, OF=group.kind)


def fused_update(
    tables: Tables, grads: Sequence[Tensor], bags: Bags, lr_T: Tensor, n: Tensor | int
) -> None:
    """See `reference.fused_update`, with blocks of `BLOCK`. [U, D] never exists."""
    groups, device = groups_of(tables, "rows"), bags.slots_N.device
    limits = [table.slots for table in tables]
    reference.check(tables, bags, limits, grads)
    entries, alive = _entries(grads, bags, limits, groups)
    lr_T, n = _on_device(lr_T, n, device)
    for group in groups:
        first, last = entries.range_of(group)
        if first < last:
            partial = entries.partial_sums(group)
            bases = numbers([[entries.bases[number]] for number in group.members], device)
            arguments = (entries.sorted, partial, bases, group.numbers, lr_T, n, first, last)
            grid = [entries.programs(group)]
            launch(updates.fused_update, grid, device, *arguments, BY=entries.how, OF=group.kind)
    del alive


def replace_rows(tables: Tables, frames_L: Tensor, rows_L: Tensor, old_L: Tensor) -> None:
    """See `reference.replace_rows`."""
    leaves_L, count = reference.leaving(tables, frames_L, old_L), tables[0].levels[0].count
    _copy_rows(tables, frames_L[leaves_L], count + old_L[leaves_L])
    _copy_rows(tables, count + rows_L, frames_L)


def _copy_rows(tables: Tables, from_U: Tensor, to_U: Tensor) -> None:
    """Copy rows from slots to slots."""
    (group,), count = groups_of(tables, "rows"), from_U.numel()
    grid, slots = [blocks(count, group.kind.ROWS)], (from_U.contiguous(), to_U.contiguous())
    launch(
        updates.copy_rows,
        grid,
        from_U.device,
        group.numbers,
        *slots,
        count,
        OF=group.kind._replace(rule=None),
    )


def count_outside(slots_N: Tensor, bounds: Sequence[int], rows: Sequence[int]) -> Tensor:
    """See `reference.count_outside`."""
    slots_N, device = slots_N.contiguous(), slots_N.device
    checked = [
        (bounds[k], bounds[k + 1] if limit >= 0 else bounds[k], limit)
        for k, limit in enumerate(rows)
    ]
    most = blocks(max((high - low for low, high, _ in checked), default=0), SIZE.value)
    counts = torch.zeros(len(rows), most, dtype=torch.int64, device=device)
    launch(
        reading.outside, [most, len(rows)], device, numbers(checked, device), slots_N, counts, most
    )
    return counts.sum(1)


def _read(
    kernel: Any, rows: list[list[int]], group: Group, bags: Bags, more: Tensor | None
) -> None:
    """Run `lookup` or `dots` over features. rows: their numbers. more: weights, or where the
    gradients go.
    """
    device = bags.slots_N.device
    grid = [
        blocks(max((row[reading.F_BAGS.value] for row in rows), default=0), group.kind.ROWS),
        len(rows),
    ]
    arguments = (
        numbers(rows, device),
        group.numbers,
        bags.slots_N,
        bags.offsets_B1,
        more,
        bags.slots_N.numel(),
    )
    align = alignment(
        chain.from_iterable((row[reading.F_OUT.value], row[reading.F_STRIDE.value]) for row in rows)
    )
    launch(kernel, grid, device, *arguments, OUT_ALIGN=align, OF=group.kind)


def _entries(
    grads: Sequence[Tensor], bags: Bags, limits: Sequence[int], groups: Sequence[Group]
) -> tuple[Entries, object]:
    """The entries of a batch, and what must live until kernels have begun."""
    bags, grads = _together(bags), _sides(grads)
    vectors, alive = gradients_of_bags(grads, bags, groups, BLOCK)
    sources = []
    for f, bag_vectors in zip(bags.lookups, vectors, strict=True):
        low, high = bags.bounds[f.key], bags.bounds[f.key + 1]
        ids = bags.slots_N.data_ptr() + low * bags.slots_N.element_size()
        row = numbers_of(bags, f, 0, bag_vectors)
        sources.append(
            Source(table=f.table, ids=ids, count=high - low, limit=limits[f.table], bags=row)
        )
    word = tl.int64 if bags.slots_N.dtype == torch.int64 else tl.int32
    return sorted_entries(sources, groups, bags, limits, BLOCK, word=word), (alive, grads, bags)


def _together(bags: Bags) -> Bags:
    """The batch with the numbers of each tensor side by side."""
    weights_N = None if bags.weights_N is None else bags.weights_N.contiguous()
    return replace(
        bags,
        slots_N=bags.slots_N.contiguous(),
        offsets_B1=bags.offsets_B1.contiguous(),
        weights_N=weights_N,
        inverses=[inverse.contiguous() for inverse in bags.inverses],
    )


def _sides(grads: Sequence[Tensor]) -> list[Tensor]:
    """The gradients in float32 with the columns of a row side by side; rows may lie apart."""
    grads = [grad.float() for grad in grads]
    return [
        grad if grad.stride(1) == 1 or grad.shape[1] == 1 else grad.contiguous() for grad in grads
    ]


def _on_device(lr_T: Tensor, n: Tensor | int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Learning rates and the number of the update, on the device."""
    number = n if isinstance(n, Tensor) else torch.full((), n, dtype=torch.int64, device=device)
    return lr_T.to(device, non_blocking=True), number.to(device, torch.int64, non_blocking=True)
