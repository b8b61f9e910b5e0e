"""Kernels that sum the gradients of each row, in blocks of fixed length and without atomics.

An entry is a lookup of a feature: a key (of table and slot) and the address of its gradient.
Entries are sorted by key, stably. A segment is the sorted entries of a row. A segment of more than
BLOCK entries is summed in blocks of BLOCK, and then the blocks are, in order; many programs share
its blocks.

Entries of a group lie in windows of BLOCK places. At most one long segment begins in a window, and
at most one block that continues a segment does. So each has a place of its own among the partial
sums: 2 * window + 1, and 2 * window.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from sparrow.kernels.embedding_bag.gpu.bags import (
    F_BAGS,
    F_FIRST_BAG,
    F_IS_NONE,
    F_LOW,
    F_OUT,
    F_STRIDE,
    bag_at,
    scale_of,
)
from sparrow.kernels.embedding_bag.gpu.codecs import row_at
from sparrow.kernels.embedding_bag.gpu.launch import SIZE, kernel

# numbers of a feature, after those in `bags.py`
G_IDS, G_COUNT, G_ENTRY, G_BASE, G_LIMIT, G_OWNER, SOURCE = (tl.constexpr(8 + i) for i in range(7))


class Sorted(NamedTuple):
    """Tensors of E entries of U segments. U is known on the device alone.

    keys: [E], sorted. order: int64 [E], which entry is in each sorted place. ranks: int64 [E], the
    segment of each place. starts: int64 [E + 1], where each segment begins; U + 1 of them are used.
    Of each entry: owners, int32, its table in the group; addresses, int64, of its gradient; scales
    and weights, which multiply it.
    """

    keys: Any
    order: Any
    ranks: Any
    starts: Any
    owners: Any
    addresses: Any
    scales: Any
    weights: Any


class How(NamedTuple):
    """How gradients are summed. Kernels call it BY.

    BLOCK: entries of a block. SCALED, WEIGHTED: whether entries have scales and weights. ALIGN: how
    many bytes divide the addresses of gradients.
    """

    BLOCK: int
    SCALED: bool
    WEIGHTED: bool
    ALIGN: int


@kernel
def entries(features, bags_N, offsets, weights_N, out, N, WORD: tl.constexpr, BY: tl.constexpr):
    """Write the entries of a feature. Grid: (lookups / SIZE, features).

    An id outside [0, limit) gets the key after those of its table, which nobody updates. bags_N:
    the bag of each lookup among those of all keys. WORD: the type of the ids.
    """
    feature = features + tl.program_id(1) * SOURCE
    i = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    valid = i < tl.load(feature + G_COUNT)
    entry = tl.load(feature + G_ENTRY) + i
    ids = tl.load(tl.load(feature + G_IDS).to(tl.pointer_type(WORD)) + i, mask=valid, other=0).to(
        tl.int64
    )
    limit = tl.load(feature + G_LIMIT)
    key = tl.load(feature + G_BASE) + tl.where((ids >= 0) & (ids < limit), ids, limit)
    tl.store(out.keys + entry, key.to(out.keys.dtype.element_ty), mask=valid)
    tl.store(out.owners + entry, tl.load(feature + G_OWNER).to(tl.int32), mask=valid)
    pooled = i < tl.where(tl.load(feature + F_IS_NONE) != 0, 0, tl.load(feature + G_COUNT))
    n = tl.load(feature + F_LOW) + i
    bag = tl.load(bags_N + n, mask=pooled, other=0) - tl.load(feature + F_FIRST_BAG)
    bag = tl.minimum(tl.maximum(bag, 0), tl.load(feature + F_BAGS) - 1)
    bag = tl.where(pooled, bag, i)
    tl.store(
        out.addresses + entry,
        tl.load(feature + F_OUT) + bag * tl.load(feature + F_STRIDE),
        mask=valid,
    )
    if BY.SCALED:
        _, length = bag_at(feature, offsets, bag, N)
        tl.store(out.scales + entry, scale_of(feature, length), mask=valid)
    if BY.WEIGHTED:
        tl.store(out.weights + entry, tl.load(weights_N + n, mask=valid, other=0.0), mask=valid)


@kernel
def segments(ranks, starts, E):
    """Write where each segment begins, and where the last one ends. ranks: the segment of each
    sorted entry.
    """
    i = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    rank = tl.load(ranks + i, mask=i < E, other=0)
    before = tl.load(ranks + i - 1, mask=(i > 0) & (i < E), other=-1)
    tl.store(starts + rank, i, mask=(i < E) & (rank != before))
    tl.store(starts + rank + 1, i + 1, mask=i == E - 1)


@triton.jit
def _add_entries(ordered, first, count, BY: tl.constexpr, OF: tl.constexpr):
    """The sum of so many sorted entries from `first` on, [ROWS, BLOCK_D], in order."""
    lanes = tl.arange(0, OF.BLOCK_D)[None, :]
    total = tl.zeros([first.shape[0], OF.BLOCK_D], tl.float32)
    for i in tl.range(0, tl.max(count), loop_unroll_factor=4):
        valid = i < count
        entry = tl.load(ordered.order + first + i, mask=valid, other=0)
        row = row_at(
            tl.load(ordered.addresses + entry, mask=valid, other=0), 0, 16, tl.float32, BY.ALIGN
        )
        grad = tl.load(row + lanes, mask=valid[:, None] & (lanes < OF.D), other=0.0)
        if BY.SCALED:
            grad = grad * tl.load(ordered.scales + entry, mask=valid, other=0.0)[:, None]
        if BY.WEIGHTED:
            grad = grad * tl.load(ordered.weights + entry, mask=valid, other=0.0)[:, None]
        total += grad
    return total


@kernel
def block_sums(ordered, partial, entry, last_entry, BY: tl.constexpr, OF: tl.constexpr):
    """Sum the blocks of long segments of the sorted entries [entry, last_entry). Grid: (2 windows /
    ROWS,).
    """
    place = tl.program_id(0).to(tl.int64) * OF.ROWS + tl.arange(0, OF.ROWS)
    is_start = place % 2 == 1
    low = entry + place // 2 * BY.BLOCK
    inside = low < last_entry
    at = tl.where(is_start, tl.minimum(low + BY.BLOCK, last_entry) - 1, low)
    rank = tl.load(ordered.ranks + at, mask=inside, other=0)
    begin, end = tl.load(ordered.starts + rank), tl.load(ordered.starts + rank + 1)
    further = begin + (low - begin + BY.BLOCK - 1) // BY.BLOCK * BY.BLOCK
    is_block = (
        tl.where(
            is_start, (begin >= low) & (end - begin > BY.BLOCK), (begin < low) & (further < end)
        )
        & inside
    )
    first = tl.where(is_start, begin, further)
    count = tl.where(is_block, tl.minimum(end - first, BY.BLOCK), 0)
    total = _add_entries(ordered, first, count, BY, OF)
    lanes = tl.arange(0, OF.BLOCK_D)[None, :]
    tl.store(
        partial + place[:, None] * OF.D + lanes, total, mask=is_block[:, None] & (lanes < OF.D)
    )


@triton.jit
def sum_of(ordered, partial, entry, segment, inside, BY: tl.constexpr, OF: tl.constexpr):
    """(first sorted entry, sum of the gradients [ROWS, BLOCK_D]) of segments. entry: the first of
    the group.
    """
    begin = tl.load(ordered.starts + segment, mask=inside, other=0)
    count = tl.load(ordered.starts + segment + 1, mask=inside, other=0) - begin
    short = tl.where(count <= BY.BLOCK, count, 0)
    total = _add_entries(ordered, begin, short, BY, OF)
    blocks = tl.where(count > BY.BLOCK, (count + BY.BLOCK - 1) // BY.BLOCK, 0)
    first = (begin - entry) // BY.BLOCK * 2
    lanes = tl.arange(0, OF.BLOCK_D)[None, :]
    for k in tl.range(0, tl.max(blocks), loop_unroll_factor=4):
        place = first + 2 * k + (1 if k == 0 else 0)
        mask = (k < blocks)[:, None] & (lanes < OF.D)
        total += tl.load(partial + place[:, None] * OF.D + lanes, mask=mask, other=0.0)
    return begin, total


@kernel
def row_sums(
    ordered, partial, out, entry, last_entry, first_key, BY: tl.constexpr, OF: tl.constexpr
):
    """Write the sums of sorted entries [entry, last_entry): segment by segment, or to row key -
    first_key.
    """
    low, high = tl.load(ordered.ranks + entry), tl.load(ordered.ranks + last_entry - 1) + 1
    lanes = tl.arange(0, OF.BLOCK_D)[None, :]
    for first in range(low + tl.program_id(0) * OF.ROWS, high, tl.num_programs(0) * OF.ROWS):
        segment = first + tl.arange(0, OF.ROWS)
        inside = segment < high
        begin, total = sum_of(ordered, partial, entry, segment, inside, BY, OF)
        row = segment - low
        if first_key is not None:
            row = tl.load(ordered.keys + begin, mask=inside, other=0).to(tl.int64) - first_key
        tl.store(out + row[:, None] * OF.D + lanes, total, mask=inside[:, None] & (lanes < OF.D))
