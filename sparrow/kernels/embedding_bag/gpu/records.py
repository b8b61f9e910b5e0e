"""Tables as kernels see them: a slot's values and state through its level, and the update of a tile
of slots.
"""

import triton
import triton.language as tl

from sparrow.kernels.embedding_bag.gpu.codecs import (
    load_row,
    load_state,
    noise,
    number_at,
    store_row,
    store_state,
)
from sparrow.kernels.embedding_bag.gpu.groups import (
    BEGIN,
    CHANGED,
    COUNT,
    FIRST_COLUMN,
    FIRST_ROW,
    KEY,
    LEVEL,
    LOW,
    OWN,
    ROWS,
    STATE0,
    STATE1,
    STATE2,
    TABLE,
    TOUCHED,
    WEIGHT,
)
from sparrow.kernels.embedding_bag.gpu.rules import apply_rule


@triton.jit
def table_at(numbers, table, OF: tl.constexpr):
    """Where the numbers of a table begin."""
    return numbers + table * (OWN + LEVEL * len(OF.levels))


@triton.jit
def level_at(at, slots, valid, number: tl.constexpr):
    """(where the numbers of a table's level begin, rows in it, which of them are there)."""
    level = at + OWN + LEVEL * number
    rows = slots - tl.load(level + BEGIN)
    return level, rows, valid & (rows >= 0) & (rows < tl.load(level + COUNT))


@triton.jit
def _payload(level):
    return tl.load(level + WEIGHT), tl.load(level + LOW)


@triton.jit
def values(at, slots, valid, OF: tl.constexpr):
    """What lookups read of slots [ROWS] of the table whose numbers begin at `at`; 0 for a slot that
    no level has.
    """
    result = tl.zeros([slots.shape[0], OF.BLOCK_D], tl.float32)
    for number in tl.static_range(len(OF.levels)):
        level, rows, in_level = level_at(at, slots, valid, number)
        row = load_row(_payload(level), rows, in_level, OF.levels[number].format, False, OF)
        result = tl.where(in_level[:, None], row, result) if len(OF.levels) > 1 else row
    return result


@triton.jit
def record(level, rows, valid, AT: tl.constexpr, OF: tl.constexpr):
    """The values of rows of a level, as a rule begins with them, and three fields of its state."""
    x = load_row(_payload(level), rows, valid, AT.format, True, OF)
    s0 = load_state(tl.load(level + STATE0), rows, valid, AT.states[0], OF)
    s1 = load_state(tl.load(level + STATE1), rows, valid, AT.states[1], OF)
    s2 = load_state(tl.load(level + STATE2), rows, valid, AT.states[2], OF)
    return x, s0, s1, s2


@triton.jit
def _noise(at, rows, n, FIELD: tl.constexpr, KIND: tl.constexpr, OF: tl.constexpr):
    """The noise of a field of rows, if its kind needs any: a number a row has column 0."""
    rows += tl.load(at + FIRST_ROW)
    if KIND == "fp32 row" or KIND == "fp32 number" or KIND == "":
        return tl.zeros([rows.shape[0], 1], tl.uint32)
    elif KIND == "bf16 number":
        return noise(tl.load(at + KEY), FIELD, rows, n, tl.zeros([rows.shape[0], 1], tl.int64))
    else:
        columns = tl.load(at + FIRST_COLUMN)[:, None] + tl.arange(0, OF.BLOCK_D)[None, :]
        return noise(tl.load(at + KEY), FIELD, rows, n, columns)


@triton.jit
def write(at, level, rows, valid, fields, n, AT: tl.constexpr, OF: tl.constexpr):
    """Write what `record` returns for rows of a level, rounded as it stores them.

    at, level: where the numbers of each row's table and level begin, [ROWS]. n: of the update, for
    all or [ROWS].
    """
    x, s0, s1, s2 = fields
    number = rows
    if AT.has_rows:
        number = tl.load(number_at(tl.load(level + ROWS), rows, tl.int32), mask=valid, other=0).to(
            tl.int64
        )
    u = _noise(at, number, n, 0, "values" if AT.is_stochastic else "", OF)
    store_row(_payload(level), rows, valid, x, u, AT.format, AT.is_stochastic, OF)
    u = _noise(at, number, n, 1, AT.states[0], OF)
    store_state(tl.load(level + STATE0), rows, valid, s0, u, AT.states[0], OF)
    u = _noise(at, number, n, 2, AT.states[1], OF)
    store_state(tl.load(level + STATE1), rows, valid, s1, u, AT.states[1], OF)
    u = _noise(at, number, n, 3, AT.states[2], OF)
    store_state(tl.load(level + STATE2), rows, valid, s2, u, AT.states[2], OF)


@triton.jit
def learn(at, slots, valid, grad, lr_T, n, OF: tl.constexpr):
    """Apply the rule once to slots [ROWS], given the sums of their gradients [ROWS, BLOCK_D]; n: of
    the update.

    A row whose gradient's square is not finite stays as it is.
    """
    learns = valid & (tl.sum(grad * grad, 1) < float("inf"))
    grad = tl.where(learns[:, None], grad, 0.0)
    lr = tl.load(lr_T + tl.load(at + TABLE))[:, None]
    for number in tl.static_range(len(OF.levels)):
        level, rows, in_level = level_at(at, slots, valid, number)
        tl.store(number_at(tl.load(level + TOUCHED), rows, tl.uint8), 1, mask=in_level)
        in_level = in_level & learns
        new = apply_rule(record(level, rows, in_level, OF.levels[number], OF), grad, lr, OF)
        write(at, level, rows, in_level, new, n, OF.levels[number], OF)
        if OF.levels[number].has_changed:
            tl.store(
                number_at(tl.load(level + CHANGED), rows, tl.int32), n.to(tl.int32), mask=in_level
            )
