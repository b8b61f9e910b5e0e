"""The entries of a batch, sorted by row: what the host does around the kernels of `sums.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from sparrow.kernels.embedding_bag.arguments import Bags
from sparrow.kernels.embedding_bag.gpu import sums
from sparrow.kernels.embedding_bag.gpu.bags import F_IS_MEAN, F_IS_NONE, F_OUT, F_STRIDE
from sparrow.kernels.embedding_bag.gpu.features import Vectors, alignment, columns_of
from sparrow.kernels.embedding_bag.gpu.groups import Group
from sparrow.kernels.embedding_bag.gpu.launch import PROGRAMS, SIZE, blocks, launch, numbers
from sparrow.kernels.embedding_bag.gpu.sums import G_COUNT, How, Sorted


@dataclass(frozen=True, kw_only=True)
class Entries:
    """Lookups with their gradients, sorted by key.

    Args:
        sorted: the entries.
        how: they are summed.
        ranges: of each table its first sorted entry, and the one after its last.
        bases: of each table its first key.
    """

    sorted: Sorted
    how: How
    ranges: list[tuple[int, int]]
    bases: list[int]

    def range_of(self, group: Group) -> tuple[int, int]:
        """Returns the first sorted entry of a group and the one after its last."""
        return self.ranges[group.members[0]][0], self.ranges[group.members[-1]][1]

    def partial_sums(self, group: Group) -> Tensor:
        """Returns the sums of the blocks of long segments of a group."""
        first, last = self.range_of(group)
        places = 2 * blocks(last - first, self.how.BLOCK)
        partial = torch.empty(places, group.kind.D, device=self.sorted.keys.device)
        grid = [blocks(places, group.kind.ROWS)]
        launch(
            sums.block_sums,
            grid,
            partial.device,
            self.sorted,
            partial,
            first,
            last,
            BY=self.how,
            OF=group.size,
        )
        return partial

    def sum_rows(self, group: Group, out: Tensor, first_key: int | None = None) -> None:
        """Write the sums of a group's segments to rows of `out`, in order, or each to row key -
        first_key.
        """
        partial, (first, last) = self.partial_sums(group), self.range_of(group)
        arguments = (self.sorted, partial, out, first, last, first_key)
        launch(
            sums.row_sums,
            [self.programs(group)],
            out.device,
            *arguments,
            BY=self.how,
            OF=group.size,
        )

    def programs(self, group: Group) -> int:
        """Returns how many programs share the segments of a group."""
        first, last = self.range_of(group)
        return min(blocks(last - first, group.kind.ROWS), PROGRAMS)


@dataclass(frozen=True, kw_only=True)
class Source:
    """Ids of a table with their gradients.

    Args:
        table: the table.
        ids: the address of the first id.
        count: how many there are.
        limit: ids are within [0, limit).
        bags: the numbers of the feature, see `numbers_of`, with the gradients of its bags as
            vectors.
    """

    table: int
    ids: int
    count: int
    limit: int
    bags: list[int]


def sorted_entries(
    sources: Sequence[Source],
    groups: Sequence[Group],
    bags: Bags,
    limits: Sequence[int],
    block: int,
    *,
    word: Any,
) -> Entries:
    """Returns the entries of all sources.

    Args:
        sources: of the same type of ids.
        groups: of all tables; keys follow their order, so that the sorted entries of a group lie
            together.
        bags: the batch; its weights count.
        limits: of each table.
        block: how many gradients of a row are summed at a time.
        word: the type of the ids.
    """
    counts = [0] * len(limits)
    for source in sources:
        counts[source.table] += source.count
    place: dict[int, int] = {}
    bases = [0] * len(limits)
    ranges = [(0, 0)] * len(limits)
    key = entry = 0
    for group in groups:
        for i, number in enumerate(group.members):
            place[number] = i
            bases[number] = key
            ranges[number] = (entry, entry + counts[number])
            key += limits[number] + 1
            entry += counts[number]
    rows: list[list[int]] = []
    begin = 0
    for source in sources:
        base = bases[source.table]
        owner = place[source.table]
        rows.append([*source.bags, source.ids, source.count, begin, base, source.limit, owner])
        begin += source.count
    how = How(
        BLOCK=block,
        SCALED=any(row[F_IS_MEAN.value] for row in rows),
        WEIGHTED=bags.weights_N is not None,
        ALIGN=alignment(
            chain.from_iterable((row[F_OUT.value], row[F_STRIDE.value]) for row in rows)
        ),
    )
    narrow = torch.int32 if key < 1 << 31 else torch.int64
    return Entries(
        sorted=_sorted(rows, bags, begin, narrow, word, how), how=how, ranges=ranges, bases=bases
    )


def _sorted(
    rows: list[list[int]], bags: Bags, E: int, keys: torch.dtype, word: Any, how: How
) -> Sorted:
    """rows: the numbers of the sources."""
    device, N = bags.slots_N.device, bags.slots_N.numel()
    is_pooled = not all(row[F_IS_NONE.value] for row in rows)
    ranks = torch.empty(E, dtype=torch.int64, device=device)
    starts = torch.empty(E + 1, dtype=torch.int64, device=device)
    unsorted = Sorted(
        keys=torch.empty(E, dtype=keys, device=device),
        order=ranks,  # until they are sorted
        ranks=ranks,
        starts=starts,
        owners=torch.empty(E, dtype=torch.int32, device=device),
        addresses=torch.empty(E, dtype=torch.int64, device=device),
        scales=torch.empty(E if how.SCALED else 0, device=device),
        weights=torch.empty(E if how.WEIGHTED else 0, device=device),
    )
    places_N = torch.arange(N if is_pooled else 0, device=device)
    bags_N = torch.searchsorted(bags.offsets_B1, places_N, right=True) - 1
    grid = [blocks(max((row[G_COUNT.value] for row in rows), default=0), SIZE.value), len(rows)]
    weights_N = unsorted.weights if bags.weights_N is None else bags.weights_N
    arguments = (numbers(rows, device), bags_N, bags.offsets_B1, weights_N, unsorted, N)
    launch(sums.entries, grid, device, *arguments, WORD=word, BY=how)
    keys_E, order = unsorted.keys.sort(stable=True)
    is_new = torch.zeros(E, dtype=torch.int64, device=device)
    is_new[1:] = keys_E[1:] != keys_E[:-1]
    torch.cumsum(is_new, 0, out=ranks)
    launch(sums.segments, [blocks(E, SIZE.value)], device, ranks, starts, E)
    return unsorted._replace(keys=keys_E, order=order)


def gradients_of_bags(
    grads: Sequence[Tensor], bags: Bags, groups: Sequence[Group], block: int
) -> tuple[list[Vectors], list[Tensor]]:
    """Returns for each feature the gradients of its bags, and the tensors that they are in.

    Those of samples that share a bag are summed, in blocks too.

    Args:
        grads: float32, with the columns of a row side by side.
        bags: the batch, with contiguous tensors.
        groups: of all tables.
        block: how many gradients of a bag are summed at a time.
    """
    vectors = [columns_of(grads[f.output], f.column) for f in bags.lookups]
    shared: list[int] = []
    for group in groups:
        for i, f in enumerate(bags.lookups):
            if f.inverse >= 0 and f.table in group.members:
                shared.append(i)
    if not shared:
        return vectors, []
    limits = [bags.bags[f.key] for f in bags.lookups]
    sources = []
    tensors = []
    for i in shared:
        samples_B = bags.inverses[bags.lookups[i].inverse]
        bag_numbers = [0, 0, 0, samples_B.numel(), False, True, *vectors[i]]
        sources.append(
            Source(
                table=i,
                ids=samples_B.data_ptr(),
                count=samples_B.numel(),
                limit=limits[i],
                bags=bag_numbers,
            )
        )
    parts: list[Group] = []
    for group in groups:
        members = [i for i in shared if bags.lookups[i].table in group.members]
        if members:
            parts.append(replace(group, members=members))
    entries = sorted_entries(
        sources, parts, replace(bags, weights_N=None), limits, block, word=tl.int64
    )
    for part in parts:
        first, last = part.members[0], part.members[-1]
        low, high = entries.bases[first], entries.bases[last] + limits[last] + 1
        sums_BD = torch.zeros(high - low, part.kind.D, device=bags.slots_N.device)
        entries.sum_rows(part, sums_BD, low)
        tensors.append(sums_BD)
        for i in part.members:
            vectors[i] = columns_of(sums_BD[entries.bases[i] - low :], 0)
    return vectors, tensors
