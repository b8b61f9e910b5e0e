"""The compiled operators under the reference's signatures, and what `torch.compile` must know of them."""

from __future__ import annotations

import torch
from torch import Tensor

from sparrow.kernels import missing
from sparrow.kernels.rules import RowRule

assert not missing(), "`resolve` comes first"
ops = torch.ops.sparrow


def lookup(
    weight_RD: Tensor, slots_N: Tensor, offsets_B1: Tensor, weights_N: Tensor | None, scale_B: Tensor | None
) -> Tensor:
    """See `reference.lookup`."""
    out_BD: Tensor = ops.lookup(weight_RD, *_dense(slots_N, offsets_B1, weights_N, scale_B))
    return out_BD


def row_gradients(
    grad_BD: Tensor,
    slots_N: Tensor,
    offsets_B1: Tensor,
    weights_N: Tensor | None,
    scale_B: Tensor | None,
    num_rows: int,
) -> tuple[Tensor, Tensor]:
    """See `reference.row_gradients`."""
    rows_U, grad_UD = ops.row_gradients(*_dense(grad_BD, slots_N, offsets_B1, weights_N, scale_B), num_rows)
    return rows_U, grad_UD


def weight_gradients(
    grad_BD: Tensor, weight_RD: Tensor, slots_N: Tensor, offsets_B1: Tensor, scale_B: Tensor | None
) -> Tensor:
    """See `reference.weight_gradients`."""
    grad_N: Tensor = ops.weight_gradients(grad_BD.contiguous(), weight_RD, *_dense(slots_N, offsets_B1, scale_B))
    return grad_N


def update_rows(
    weight_RD: Tensor,
    state: dict[str, Tensor],
    touched_R: Tensor,
    rows_U: Tensor,
    grad_UD: Tensor,
    rule: RowRule,
    lr: Tensor,
) -> None:
    """See `reference.update_rows`."""
    name, numbers = rule.cpp()
    ops.update_rows(weight_RD, list(state.values()), touched_R, *_dense(rows_U, grad_UD), name, lr, numbers)


def fused_update(
    weight_RD: Tensor,
    state: dict[str, Tensor],
    touched_R: Tensor,
    grad_BD: Tensor,
    slots_N: Tensor,
    offsets_B1: Tensor,
    weights_N: Tensor | None,
    scale_B: Tensor | None,
    rule: RowRule,
    lr: Tensor,
) -> None:
    """See `reference.fused_update`; each row's gradient goes from scratch through the rule, [U, D] never exists."""
    name, numbers = rule.cpp()
    bags = _dense(grad_BD, slots_N, offsets_B1, weights_N, scale_B)
    ops.fused_update(weight_RD, list(state.values()), touched_R, *bags, name, lr, numbers)


def _dense(*tensors: Tensor | None) -> list[Tensor | None]:
    return [t if t is None else t.contiguous() for t in tensors]


@torch.library.register_fake("sparrow::lookup")
def _(weight: Tensor, slots: Tensor, offsets: Tensor, weights: Tensor | None, scale: Tensor | None) -> Tensor:
    return weight.new_empty(offsets.shape[0] - 1, weight.shape[1])


@torch.library.register_fake("sparrow::row_gradients")
def _(
    grad: Tensor, slots: Tensor, offsets: Tensor, weights: Tensor | None, scale: Tensor | None, num_rows: int
) -> tuple[Tensor, Tensor]:
    unique = torch.library.get_ctx().new_dynamic_size()
    return slots.new_empty(unique, dtype=torch.int64), grad.new_empty(unique, grad.shape[1])


@torch.library.register_fake("sparrow::weight_gradients")
def _(grad: Tensor, weight: Tensor, slots: Tensor, offsets: Tensor, scale: Tensor | None) -> Tensor:
    return grad.new_empty(slots.shape[0])


@torch.library.register_fake("sparrow::update_rows")
def _(
    weight: Tensor, state: list[Tensor], touched: Tensor, rows: Tensor, grad: Tensor,
    rule: str, lr: Tensor, numbers: list[float],
) -> None:  # fmt: skip
    pass


@torch.library.register_fake("sparrow::fused_update")
def _(
    weight: Tensor, state: list[Tensor], touched: Tensor, grad: Tensor, slots: Tensor, offsets: Tensor,
    weights: Tensor | None, scale: Tensor | None, rule: str, lr: Tensor, numbers: list[float],
) -> None:  # fmt: skip
    pass
