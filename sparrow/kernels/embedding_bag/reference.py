"""The definition, in plain torch, for any device; `README.md` has the mathematics, `arguments.py`
the shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from sparrow.core.errors import UserError
from sparrow.kernels.embedding_bag.arguments import Bags, Lookup, Rows, Table, Tables
from sparrow.kernels.expand.reference import sum_in_blocks
from sparrow.kernels.formats import fp32
from sparrow.kernels.rules._regularized import learns, regularized_update
from sparrow.numerics.rounding import noise, state_to_bf16


def knows(tables: Tables) -> bool:
    """It knows all row formats."""
    return True


def lookup(tables: Tables, bags: Bags) -> list[Tensor]:
    """out_b = scale_b * sum over bag b of weights_n * W[slot_n]; scale is 1 / length for a mean,
    else 1.

    For a product W[slot_n] is multiplied by V[slot'_n], the row of the second table.
    """
    check(tables, bags, [table.slots for table in tables])
    none = _none(tables)
    shapes = bags.outputs([table.dim for table in tables])
    out = [none.new_empty(shape) for shape in shapes]
    for f in bags.lookups:
        part = _Part(bags, f)
        rows_ND = _values(tables[f.table], part.slots_N)
        if f.by >= 0:
            rows_ND = rows_ND * _values(tables[f.by], part.by_N)
        if part.weights_N is not None:
            rows_ND = rows_ND * part.weights_N[:, None]
        pooled_BD = rows_ND
        if f.pooling != "none":
            pooled_BD = _sum_rows(rows_ND, part.bag_N, part.scale_B.numel()) * part.scale_B[:, None]
        if f.inverse >= 0:
            pooled_BD = pooled_BD[bags.inverses[f.inverse]]
        out[f.output][:, f.column : f.column + tables[f.table].dim] = pooled_BD
    return out


def row_gradients(
    tables: Tables, grads: Sequence[Tensor], bags: Bags, block: int | None = None
) -> list[tuple[Tensor, Tensor]]:
    """G_r = sum over lookups n of row r, in order, of (grad_b * scale_b) * weights_n, b being the
    bag of n.

    For a product it is (grad_b * scale_b) * weights_n * V[slot'_n], and W[slot_n] takes part in the
    other's.

    block: every so many of them are summed first, and then these sums, in order, as many programs
    of a GPU do.
    """
    return _summed(tables, grads, bags, [table.rows for table in tables], block)


def _summed(
    tables: Tables, grads: Sequence[Tensor], bags: Bags, limits: Sequence[int], block: int | None
) -> list[tuple[Tensor, Tensor]]:
    check(tables, bags, limits, grads)
    rows: list[list[Tensor]] = [[] for _ in tables]
    values: list[list[Tensor]] = [[] for _ in tables]
    for f in bags.lookups:
        part = _Part(bags, f)
        grad_BD = _stored_gradients(grads, bags, f, tables[f.table], block)
        grad_ND = (grad_BD * part.scale_B[:, None])[part.bag_N]
        if part.weights_N is not None:
            grad_ND = grad_ND * part.weights_N[:, None]
        if f.by >= 0:
            rows[f.by].append(part.by_N)
            values[f.by].append(grad_ND * _values(tables[f.table], part.slots_N))
            grad_ND = grad_ND * _values(tables[f.by], part.by_N)
        rows[f.table].append(part.slots_N)
        values[f.table].append(grad_ND)
    gradients = []
    for table, slots, grad in zip(tables, rows, values, strict=True):
        none = _none(tables)
        slots_N = torch.cat([none.new_empty(0, dtype=torch.int64), *slots])
        rows_U, unique_N = slots_N.unique(return_inverse=True)
        grad_UD = _sum_rows(
            torch.cat([none.new_empty(0, table.dim), *grad]), unique_N, rows_U.numel(), block
        )
        gradients.append((rows_U, grad_UD))
    return gradients


def weight_gradients(
    tables: Tables, grads: Sequence[Tensor], bags: Bags, block: int | None = None
) -> Tensor:
    """The gradient of weights_n = scale_b * <grad_b, W[slot_n]>, summed over the features that use
    the key.
    """
    check(tables, bags, [table.slots for table in tables], grads)
    grad_N = bags.slots_N.new_zeros(
        bags.slots_N.numel(), dtype=grads[0].dtype if grads else torch.float32
    )
    for f in bags.lookups:
        part = _Part(bags, f)
        grad_BD = _stored_gradients(grads, bags, f, tables[f.table], block)
        rows_ND = _values(tables[f.table], part.slots_N)
        if f.by >= 0:
            rows_ND = rows_ND * _values(tables[f.by], part.by_N)
        dots_N = (grad_BD[part.bag_N] * rows_ND).sum(dim=1) * part.scale_B[part.bag_N]
        grad_N[bags.bounds[f.key] : bags.bounds[f.key + 1]] += dots_N
    return grad_N


def update_rows(
    tables: Tables, gradients: Sequence[tuple[Tensor, Tensor]], lr_T: Tensor, n: Tensor | int
) -> None:
    """The rule, once for every row in rows_U. See `numerics.rounding` for what is rounded
    stochastically.
    """
    check_rows(tables, gradients)
    for table, (rows_U, grad_UD), lr in zip(tables, gradients, lr_T, strict=True):
        first = 0
        for level in table.levels:
            count = level.count
            in_level_U = (rows_U >= first) & (rows_U < first + count)
            level.touched_R[rows_U[in_level_U] - first] = 1
            in_level_U &= learns(grad_UD)
            _update_level(table, level, rows_U[in_level_U] - first, grad_UD[in_level_U], lr, n)
            first += count


def replace_rows(tables: Tables, frames_L: Tensor, rows_L: Tensor, old_L: Tensor) -> None:
    """Copy what was updated from the frames to the levels beneath, then the rows that enter into
    the frames.
    """
    leaves_L, count = leaving(tables, frames_L, old_L), tables[0].levels[0].count
    _copy_rows(tables[0], frames_L[leaves_L], count + old_L[leaves_L])
    _copy_rows(tables[0], count + rows_L, frames_L)


def leaving(tables: Tables, frames_L: Tensor, old_L: Tensor) -> Tensor:
    """Returns which rows were updated in their frames, bool [L]."""
    changed_R = tables[0].levels[0].changed_R
    assert changed_R is not None
    return (old_L >= 0) & (changed_R[frames_L] > 0)


def _copy_rows(table: Table, from_U: Tensor, to_U: Tensor) -> None:
    """The record in slot from_u to slot to_u; what is rounded takes the number of its last
    update.
    """
    first = 0
    for level in table.levels:
        in_level_U = (from_U >= first) & (from_U < first + level.count)
        rows_V = from_U[in_level_U] - first
        values_VD = level.format.exact(
            {name: t[rows_V] for name, t in level.payload.items()}, table.dim
        )
        state = {name: t[rows_V].float() for name, t in level.state.items()}
        n_V = torch.zeros_like(rows_V)
        if level.changed_R is not None:
            n_V = level.changed_R[rows_V].long()
        before = 0
        for target in table.levels:
            into_V = (to_U[in_level_U] >= before) & (to_U[in_level_U] < before + target.count)
            rows_W = to_U[in_level_U][into_V] - before
            target_state = {name: t[into_V] for name, t in state.items()}
            _write(table, target, rows_W, values_VD[into_V], target_state, n_V[into_V])
            target.touched_R[rows_W] = level.touched_R[rows_V][into_V]
            if target.changed_R is not None:
                target.changed_R[rows_W] = 0
            before += target.count
        first += level.count


def _update_level(
    table: Table, level: Rows, rows_V: Tensor, grad_VD: Tensor, lr: Tensor, n: Tensor | int
) -> None:
    state = {name: tensor[rows_V] for name, tensor in level.state.items()}
    state = {
        name: tensor.float() if tensor.dtype == torch.bfloat16 else tensor
        for name, tensor in state.items()
    }
    values_VD = level.format.exact(
        {name: tensor[rows_V] for name, tensor in level.payload.items()}, table.dim
    )
    values_VD, state = regularized_update(table.rule, values_VD, state, grad_VD, lr)
    _write(table, level, rows_V, values_VD, state, n)
    if level.changed_R is not None:
        level.changed_R[rows_V] = torch.as_tensor(n, dtype=torch.int32, device=rows_V.device)


def _write(
    table: Table,
    level: Rows,
    rows_V: Tensor,
    values_VD: Tensor,
    state: dict[str, Tensor],
    n: Tensor | int,
) -> None:
    """Write some rows of a level, rounded as it stores them."""
    first_row, first_column = table.place
    columns = (first_column, first_column + table.dim)
    numbers_V = first_row + (rows_V if level.rows_R is None else level.rows_R[rows_V].long())
    noise_VD = None
    if level.format.rounding == "stochastic":
        noise_VD = noise(table.key, 0, numbers_V, columns, n)
    for name, tensor in level.format.encode(values_VD, noise_VD).items():
        level.payload[name][rows_V] = tensor
    for number, (name, tensor) in enumerate(level.state.items(), 1):
        new = state[name]
        if tensor.dtype == torch.bfloat16:
            new = state_to_bf16(new, table.key, number, numbers_V, columns, n)
        tensor[rows_V] = new


def fused_update(
    tables: Tables,
    grads: Sequence[Tensor],
    bags: Bags,
    lr_T: Tensor,
    n: Tensor | int,
    block: int | None = None,
) -> None:
    """`row_gradients` of slots, then `update_rows`."""
    update_rows(
        tables, _summed(tables, grads, bags, [table.slots for table in tables], block), lr_T, n
    )


def count_outside(slots_N: Tensor, bounds: Sequence[int], rows: Sequence[int]) -> Tensor:
    """For every key, how many of slots_N[bounds_k : bounds_k+1] are outside [0, rows_k); rows_k <
    0: not looked at.
    """
    counts = []
    for k, limit in enumerate(rows):
        part = slots_N[bounds[k] : bounds[k + 1]]
        counts.append(
            ((part < 0) | (part >= limit)).sum()
            if limit >= 0
            else part.new_zeros((), dtype=torch.int64)
        )
    return torch.stack(counts) if counts else slots_N.new_zeros(0, dtype=torch.int64)


class _Part:
    """One feature's share of a batch."""

    def __init__(self, bags: Bags, f: Lookup) -> None:
        low, high = bags.bounds[f.key], bags.bounds[f.key + 1]
        self.slots_N = bags.slots_N[low:high].long()
        self.weights_N = None if bags.weights_N is None else bags.weights_N[low:high]
        if f.by >= 0:
            self.by_N = bags.slots_N[bags.bounds[f.by_key] : bags.bounds[f.by_key + 1]].long()
        lengths_B = _offsets(bags, f).diff()
        if f.pooling == "none":
            lengths_B = torch.ones_like(self.slots_N)
        count = torch.arange(lengths_B.numel(), device=lengths_B.device)
        self.bag_N = count.repeat_interleave(lengths_B, output_size=high - low)
        self.scale_B = torch.ones(lengths_B.numel(), device=lengths_B.device)
        if f.pooling == "mean":
            self.scale_B = 1.0 / lengths_B.clamp(min=1)


def _values(table: Table, slots_N: Tensor) -> Tensor:
    """The values of rows, float32 [N, D]."""
    if len(table.levels) == 1:
        return _decoded(table, table.levels[0], slots_N)
    none_0D = _decoded(table, table.levels[0], slots_N[:0])
    values_ND = none_0D.new_empty(slots_N.numel(), table.dim)
    first = 0
    for level in table.levels:
        in_level_N = (slots_N >= first) & (slots_N < first + level.count)
        values_ND[in_level_N] = _decoded(table, level, slots_N[in_level_N] - first)
        first += level.count
    return values_ND


def _decoded(table: Table, level: Rows, rows_N: Tensor) -> Tensor:
    return level.format.decode(
        {name: tensor[rows_N] for name, tensor in level.payload.items()}, table.dim
    )


def _none(tables: Tables) -> Tensor:
    """The values of no row: their type and device."""
    level = tables[0].levels[0]
    return _decoded(tables[0], level, level.touched_R.new_empty(0, dtype=torch.int64))


def check(
    tables: Tables, bags: Bags, limits: Sequence[int], grads: Sequence[Tensor] | None = None
) -> None:
    """Refuse a batch that does not fit, except what only a GPU knows: asking would stall it.

    Args:
        tables: T tables.
        bags: a batch.
        limits: of each table, its slots or its rows.
        grads: the gradients of its outputs.
    """
    keys, N = len(bags.bags), bags.slots_N.numel()
    if len(bags.bounds) != keys + 1 or (bags.weights_N is not None and bags.weights_N.numel() != N):
        raise UserError(
            f"bounds or weights_N: expected {keys + 1} bounds for {keys} keys and {N} weights for"
            " the slots"
        )
    for i, f in enumerate(bags.lookups):
        known = (
            0 <= f.table < len(tables)
            and 0 <= f.key < keys
            and -1 <= f.inverse < len(bags.inverses)
        )
        known = known and f.output >= 0 and f.column >= 0 and f.by < len(tables) and f.by_key < keys
        if not known or (f.inverse >= 0 and f.pooling == "none"):
            raise UserError(
                f"features: feature {i} names a table, key, inverse or output that is not there"
            )
    ends = (
        bags.offsets_B1[[0, -1]].tolist()
        if not bags.offsets_B1.is_cuda
        else [0, bags.slots_N.numel()]
    )
    if ends != [0, bags.slots_N.numel()] or sum(bags.bags) != bags.offsets_B1.numel() - 1:
        raise UserError(
            f"offsets_B1 must go from 0 to the {bags.slots_N.numel()} slots and never fall"
        )
    for i, f in enumerate(bags.lookups):
        if f.by >= 0:
            _check_product(tables, bags, f, i)
        for table, key in ((f.table, f.key), (f.by, f.by_key))[: 1 + (f.by >= 0)]:
            if not bags.slots_N.is_cuda:
                _check_feature(bags, replace(f, table=table, key=key), i, limits[table])
    if grads is not None:
        shapes = bags.outputs([table.dim for table in tables])
        if [tuple(grad.shape) for grad in grads] != shapes:
            raise UserError(
                f"grads: expected shapes {shapes}, got {[tuple(grad.shape) for grad in grads]}"
            )


def _check_product(tables: Tables, bags: Bags, f: Lookup, number: int) -> None:
    for table in (tables[f.table], tables[f.by]):
        if len(table.levels) > 1 or not isinstance(table.levels[0].format, fp32.Config):
            raise UserError(
                f"features: feature {number} multiplies rows that are not of fp32 on one level"
            )
    lengths_B, by_B = _offsets(bags, f).diff(), _offsets(bags, replace(f, key=f.by_key)).diff()
    if tables[f.table].dim != tables[f.by].dim or not torch.equal(lengths_B, by_B):
        raise UserError(
            f"features: feature {number} multiplies rows of other dims, or bags of other lengths"
        )


def check_rows(tables: Tables, gradients: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Refuse rows that do not ascend within their table, except on a GPU."""
    for table, (rows_U, _) in zip(tables, gradients, strict=True):
        if not rows_U.is_cuda and not (_within(rows_U, table.slots) and (rows_U.diff() > 0).all()):
            raise UserError(f"rows_U must ascend within [0, {table.slots})")


def _check_feature(bags: Bags, f: Lookup, number: int, rows: int) -> None:
    low, high = bags.bounds[f.key], bags.bounds[f.key + 1]
    offsets_B1, slots_N = _offsets(bags, f), bags.slots_N[low:high].long()
    rise = offsets_B1[0] == low and offsets_B1[-1] == high and (offsets_B1.diff() >= 0).all()
    if f.pooling != "none" and not rise:
        raise UserError(
            f"offsets_B1 must go from 0 to the {bags.slots_N.numel()} slots and never fall"
        )
    bad = ((slots_N < 0) | (slots_N >= rows)).nonzero()
    if len(bad):
        slot, place = int(slots_N[bad[0]]), f"position {int(bad[0])} of feature {number}"
        raise UserError(f"slot {slot} at {place} is outside [0, {rows}) of table {f.table}")
    if f.inverse >= 0 and not _within(bags.inverses[f.inverse], bags.bags[f.key]):
        raise UserError(f"inverse_B: an index is outside [0, {bags.bags[f.key]})")


def _offsets(bags: Bags, f: Lookup) -> Tensor:
    first = sum(bags.bags[: f.key])
    return bags.offsets_B1[first : first + bags.bags[f.key] + 1]


def _stored_gradients(
    grads: Sequence[Tensor], bags: Bags, f: Lookup, table: Table, block: int | None
) -> Tensor:
    """The gradients of a feature's bags: those of its samples, summed over the samples that share a
    bag.
    """
    grad_BD = grads[f.output][:, f.column : f.column + table.dim]
    return (
        grad_BD
        if f.inverse < 0
        else _sum_rows(grad_BD, bags.inverses[f.inverse], bags.bags[f.key], block)
    )


def _within(index: Tensor, size: int) -> bool:
    return bool(((index >= 0) & (index < size)).all())


def _sum_rows(values_ND: Tensor, index_N: Tensor, count: int, block: int | None = None) -> Tensor:
    if block is not None:
        return sum_in_blocks(values_ND, index_N, count, block)
    out = values_ND.new_zeros(count, values_ND.shape[1])
    # here index_add_ adds in the order in which threads arrive, index_put_ in a fixed one
    if values_ND.is_cuda:
        return out.index_put_((index_N,), values_ND, accumulate=True)
    return out.index_add_(0, index_N, values_ND)
