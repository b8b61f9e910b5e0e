"""Kernels that read rows: pooled lookups, their expansion to samples, gradients of weights, and
slots outside.
"""

import triton
import triton.language as tl

from sparrow.kernels.embedding_bag.gpu.codecs import vectors_at
from sparrow.kernels.embedding_bag.gpu.launch import SIZE, kernel
from sparrow.kernels.embedding_bag.gpu.records import table_at, values

# numbers of a feature: see `features.numbers_of`
F_TABLE, F_LOW, F_FIRST_BAG, F_BAGS, F_IS_MEAN, F_IS_NONE, F_OUT, F_STRIDE, FEATURE = (
    tl.constexpr(i) for i in range(9)
)


@triton.jit
def bag_at(feature, offsets, bags, N):
    """(first lookup, length) of bags [ROWS] of a feature; inside [0, N) whatever the offsets
    are.
    """
    inside = bags < tl.load(feature + F_BAGS)
    is_none = tl.load(feature + F_IS_NONE) != 0
    pooled = bags < tl.where(is_none, 0, tl.load(feature + F_BAGS))
    at = offsets + tl.load(feature + F_FIRST_BAG) + bags
    first = tl.where(is_none, tl.load(feature + F_LOW) + bags, tl.load(at, mask=pooled, other=0))
    last = tl.where(is_none, first + 1, tl.load(at + 1, mask=pooled, other=0))
    first = tl.minimum(tl.maximum(first, 0), N)
    length = tl.minimum(last, N) - first
    return first, tl.where(inside, tl.maximum(length, 0), 0)


@triton.jit
def scale_of(feature, length):
    """1 / length for a mean, else 1, [ROWS]."""
    is_mean = tl.load(feature + F_IS_MEAN) != 0
    return tl.where(is_mean, tl.math.div_rn(1.0, tl.maximum(length, 1).to(tl.float32)), 1.0)


@kernel
def lookup(
    features, numbers, slots, offsets, weights, N, OUT_ALIGN: tl.constexpr, OF: tl.constexpr
):
    """Pool ROWS bags of a feature and write their vectors. Grid: (bags / ROWS, features)."""
    feature = features + tl.program_id(1) * FEATURE
    at = table_at(numbers, tl.load(feature + F_TABLE), OF)
    bags = tl.program_id(0).to(tl.int64) * OF.ROWS + tl.arange(0, OF.ROWS)
    first, length = bag_at(feature, offsets, bags, N)
    pooled = tl.zeros([OF.ROWS, OF.BLOCK_D], tl.float32)
    for i in tl.range(0, tl.max(length), loop_unroll_factor=4):
        has_entry = i < length
        slot = tl.load(slots + first + i, mask=has_entry, other=0).to(tl.int64)
        row = values(at, slot, has_entry, OF)
        if weights is not None:
            row = row * tl.load(weights + first + i, mask=has_entry, other=0.0)[:, None]
        pooled += row
    pooled = pooled * scale_of(feature, length)[:, None]
    lanes = tl.arange(0, OF.BLOCK_D)[None, :]
    out = vectors_at(tl.load(feature + F_OUT), bags, tl.load(feature + F_STRIDE), OUT_ALIGN)
    inside = bags < tl.load(feature + F_BAGS)
    tl.store(out + lanes, pooled, mask=inside[:, None] & (lanes < OF.D))


# numbers of an expansion
E_FROM, E_INVERSE, E_SAMPLES, E_BAGS, E_OUT, E_STRIDE, EXPANSION = (
    tl.constexpr(i) for i in range(7)
)


@kernel
def expand(expansions, OUT_ALIGN: tl.constexpr, OF: tl.constexpr):
    """Copy the vector of its bag to each of ROWS samples; 0 if it has none. Grid: (samples / ROWS,
    features).
    """
    expansion = expansions + tl.program_id(1) * EXPANSION
    samples = tl.program_id(0).to(tl.int64) * OF.ROWS + tl.arange(0, OF.ROWS)
    inside = samples < tl.load(expansion + E_SAMPLES)
    bags = tl.load(
        tl.load(expansion + E_INVERSE).to(tl.pointer_type(tl.int64)) + samples,
        mask=inside,
        other=-1,
    )
    lanes = tl.arange(0, OF.BLOCK_D)[None, :]
    has_bag = inside & (bags >= 0) & (bags < tl.load(expansion + E_BAGS))
    row = vectors_at(tl.load(expansion + E_FROM), bags, OF.D * 4, OUT_ALIGN)
    vector = tl.load(row + lanes, mask=has_bag[:, None] & (lanes < OF.D), other=0.0)
    out = vectors_at(tl.load(expansion + E_OUT), samples, tl.load(expansion + E_STRIDE), OUT_ALIGN)
    tl.store(out + lanes, vector, mask=inside[:, None] & (lanes < OF.D))


@kernel
def dots(features, numbers, slots, offsets, grad_N, N, OUT_ALIGN: tl.constexpr, OF: tl.constexpr):
    """Add a feature's share to the gradient of each weight. F_OUT: the gradients of its bags. Grid
    as for `lookup`.
    """
    feature = features + tl.program_id(1) * FEATURE
    at = table_at(numbers, tl.load(feature + F_TABLE), OF)
    bags = tl.program_id(0).to(tl.int64) * OF.ROWS + tl.arange(0, OF.ROWS)
    first, length = bag_at(feature, offsets, bags, N)
    lanes = tl.arange(0, OF.BLOCK_D)[None, :]
    grads = vectors_at(tl.load(feature + F_OUT), bags, tl.load(feature + F_STRIDE), OUT_ALIGN)
    inside = bags < tl.load(feature + F_BAGS)
    grad = tl.load(grads + lanes, mask=inside[:, None] & (lanes < OF.D), other=0.0)
    scale = scale_of(feature, length)
    for i in tl.range(0, tl.max(length), loop_unroll_factor=4):
        has_entry = i < length
        slot = tl.load(slots + first + i, mask=has_entry, other=0).to(tl.int64)
        row = values(at, slot, has_entry, OF)
        place = grad_N + first + i
        dot = tl.sum(grad * row, 1) * scale
        tl.store(place, tl.load(place, mask=has_entry, other=0.0) + dot, mask=has_entry)


@kernel
def outside(limits, slots, counts, BLOCKS):
    """Count the slots of a key outside [0, rows) in blocks of SIZE. Grid: (blocks, keys). limits:
    first, last, rows.
    """
    key = tl.program_id(1)
    low = tl.load(limits + key * 3)
    high = tl.load(limits + key * 3 + 1)
    rows = tl.load(limits + key * 3 + 2)
    places = low + tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    slot = tl.load(slots + places, mask=places < high, other=0).to(tl.int64)
    bad = (places < high) & ((slot < 0) | (slot >= rows))
    tl.store(counts + key * BLOCKS + tl.program_id(0), tl.sum(bad.to(tl.int64)))
