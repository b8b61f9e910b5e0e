"""Kernels that write rows."""

import triton.language as tl

from sparrow.kernels.embedding_bag.gpu.codecs import number_at, vectors_at
from sparrow.kernels.embedding_bag.gpu.groups import CHANGED, TOUCHED
from sparrow.kernels.embedding_bag.gpu.launch import kernel
from sparrow.kernels.embedding_bag.gpu.records import learn, level_at, record, table_at, write
from sparrow.kernels.embedding_bag.gpu.sums import sum_of


@kernel
def fused_update(
    ordered, partial, bases, numbers, lr_T, n, entry, last_entry, BY: tl.constexpr, OF: tl.constexpr
):
    """Sum the gradients of each row of the sorted entries [entry, last_entry) and apply the rule to
    it.

    bases: of each table in the group its first key.
    """
    low, high = tl.load(ordered.ranks + entry), tl.load(ordered.ranks + last_entry - 1) + 1
    number = tl.load(n)
    for first in range(low + tl.program_id(0) * OF.ROWS, high, tl.num_programs(0) * OF.ROWS):
        segment = first + tl.arange(0, OF.ROWS)
        inside = segment < high
        begin, grad = sum_of(ordered, partial, entry, segment, inside, BY, OF)
        table = tl.load(
            ordered.owners + tl.load(ordered.order + begin, mask=inside, other=0),
            mask=inside,
            other=0,
        )
        slots = tl.load(ordered.keys + begin, mask=inside, other=0).to(tl.int64) - tl.load(
            bases + table
        )
        at = table_at(numbers, table, OF)
        learn(at, slots, inside, grad, lr_T, number, OF)


# numbers of given gradients
U_TABLE, U_ROWS, U_COUNT, U_GRAD, U_STRIDE, GIVEN = (tl.constexpr(i) for i in range(6))


@kernel
def update_rows(arguments, numbers, lr_T, n, GRAD_ALIGN: tl.constexpr, OF: tl.constexpr):
    """Apply the rule to ROWS rows whose gradients are given. Grid: (rows / ROWS, tables)."""
    argument = arguments + tl.program_id(1) * GIVEN
    place = tl.program_id(0).to(tl.int64) * OF.ROWS + tl.arange(0, OF.ROWS)
    inside = place < tl.load(argument + U_COUNT)
    slots = tl.load(
        tl.load(argument + U_ROWS).to(tl.pointer_type(tl.int64)) + place, mask=inside, other=-1
    )
    lanes = tl.arange(0, OF.BLOCK_D)[None, :]
    rows = vectors_at(tl.load(argument + U_GRAD), place, tl.load(argument + U_STRIDE), GRAD_ALIGN)
    grad = tl.load(rows + lanes, mask=inside[:, None] & (lanes < OF.D), other=0.0)
    table = tl.zeros([OF.ROWS], tl.int64) + tl.load(argument + U_TABLE)
    learn(table_at(numbers, table, OF), slots, inside, grad, lr_T, tl.load(n), OF)


@kernel
def copy_rows(numbers, from_U, to_U, U, OF: tl.constexpr):
    """Copy the records of ROWS slots, rounded with the number of their last update. Grid: (U /
    ROWS,).
    """
    place = tl.program_id(0).to(tl.int64) * OF.ROWS + tl.arange(0, OF.ROWS)
    inside = place < U
    source = tl.load(from_U + place, mask=inside, other=-1)
    target = tl.load(to_U + place, mask=inside, other=-1)
    at = table_at(numbers, tl.zeros([OF.ROWS], tl.int64), OF)
    for out in tl.static_range(len(OF.levels)):
        level, rows, in_level = level_at(at, source, inside, out)
        fields = record(level, rows, in_level, OF.levels[out], OF)
        touched = tl.load(
            number_at(tl.load(level + TOUCHED), rows, tl.uint8), mask=in_level, other=0
        )
        n = tl.zeros([OF.ROWS], tl.int64)
        if OF.levels[out].has_changed:
            n = tl.load(
                number_at(tl.load(level + CHANGED), rows, tl.int32), mask=in_level, other=0
            ).to(tl.int64)
        for into in tl.static_range(len(OF.levels)):
            level, rows, entered = level_at(at, target, in_level, into)
            write(at, level, rows, entered, fields, n, OF.levels[into], OF)
            tl.store(number_at(tl.load(level + TOUCHED), rows, tl.uint8), touched, mask=entered)
            if OF.levels[into].has_changed:
                tl.store(number_at(tl.load(level + CHANGED), rows, tl.int32), 0, mask=entered)
