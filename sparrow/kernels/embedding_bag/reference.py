"""The definition, in plain torch, for any device; `README.md` has the mathematics, `__init__.py` the shapes."""

from __future__ import annotations

import torch
from torch import Tensor

from sparrow.core.errors import UserError
from sparrow.kernels.rules import RowRule


def lookup(
    weight_RD: Tensor, slots_N: Tensor, offsets_B1: Tensor, weights_N: Tensor | None, scale_B: Tensor | None
) -> Tensor:
    """out_b = scale_b * sum over bag b of weights_n * weight_RD[slots_n]."""
    bag_N = _bag_of_each(slots_N, offsets_B1, weight_RD.shape[0])
    rows_ND = weight_RD[slots_N.long()]
    if weights_N is not None:
        rows_ND = rows_ND * weights_N[:, None]
    out_BD = _sum_rows(rows_ND, bag_N, offsets_B1.numel() - 1)
    return out_BD if scale_B is None else out_BD * scale_B[:, None]


def row_gradients(
    grad_BD: Tensor,
    slots_N: Tensor,
    offsets_B1: Tensor,
    weights_N: Tensor | None,
    scale_B: Tensor | None,
    num_rows: int,
) -> tuple[Tensor, Tensor]:
    """grad_r = sum over lookups n of row r, in order, of weights_n * scale_b * grad_b, b being the bag of n."""
    grad_ND = _scaled(grad_BD, scale_B)[_bag_of_each(slots_N, offsets_B1, num_rows)]
    if weights_N is not None:
        grad_ND = grad_ND * weights_N[:, None]
    rows_U, unique_N = slots_N.long().unique(return_inverse=True)
    return rows_U, _sum_rows(grad_ND, unique_N, rows_U.numel())


def weight_gradients(
    grad_BD: Tensor, weight_RD: Tensor, slots_N: Tensor, offsets_B1: Tensor, scale_B: Tensor | None
) -> Tensor:
    """The gradient of weights_n = scale_b * <grad_b, weight_RD[slots_n]>."""
    bag_N = _bag_of_each(slots_N, offsets_B1, weight_RD.shape[0])
    return (_scaled(grad_BD, scale_B)[bag_N] * weight_RD[slots_N.long()]).sum(dim=1)


def update_rows(
    weight_RD: Tensor,
    state: dict[str, Tensor],
    touched_R: Tensor,
    rows_U: Tensor,
    grad_UD: Tensor,
    rule: RowRule,
    lr: Tensor,
) -> None:
    """The rule, once for every row in rows_U."""
    rows = {name: field[rows_U] for name, field in state.items()}
    weight_UD, rows = rule.update(weight_RD[rows_U], rows, grad_UD, lr)
    weight_RD[rows_U] = weight_UD
    for name, field in state.items():
        field[rows_U] = rows[name]
    touched_R[rows_U] = 1


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
    """`row_gradients`, then `update_rows`."""
    rows_U, grad_UD = row_gradients(grad_BD, slots_N, offsets_B1, weights_N, scale_B, weight_RD.shape[0])
    update_rows(weight_RD, state, touched_R, rows_U, grad_UD, rule, lr)


def _scaled(grad_BD: Tensor, scale_B: Tensor | None) -> Tensor:
    return grad_BD if scale_B is None else grad_BD * scale_B[:, None]


def _sum_rows(values_ND: Tensor, index_N: Tensor, count: int) -> Tensor:
    out = values_ND.new_zeros(count, values_ND.shape[1])
    if values_ND.is_cuda:  # here index_add_ adds in the order in which threads arrive, index_put_ in a fixed one
        return out.index_put_((index_N,), values_ND, accumulate=True)
    return out.index_add_(0, index_N, values_ND)


def _bag_of_each(slots_N: Tensor, offsets_B1: Tensor, rows: int) -> Tensor:
    """The bag [N] of every lookup; checks slots and offsets, except on a GPU, which it would stall."""
    lengths_B = offsets_B1.diff()
    if not slots_N.is_cuda:
        if not (offsets_B1[0] == 0 and offsets_B1[-1] == slots_N.numel() and (lengths_B >= 0).all()):
            raise UserError(f"offsets_B1 must go from 0 to the {slots_N.numel()} slots and never fall")
        bad = ((slots_N < 0) | (slots_N >= rows)).nonzero()
        if len(bad):
            n = int(bad[0])
            raise UserError(f"slot {int(slots_N[n])} at position {n} is outside [0, {rows})")
    bags = torch.arange(lengths_B.numel(), device=lengths_B.device)
    return bags.repeat_interleave(lengths_B, output_size=slots_N.numel())
