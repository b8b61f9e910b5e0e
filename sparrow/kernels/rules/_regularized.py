"""The definition of a row update: a rule with its regularization, as the reference computes it."""

from __future__ import annotations

import torch
from torch import Tensor

from sparrow.kernels.rules import RowRule


def learns(grad_UD: Tensor) -> Tensor:
    """Returns bool [U]: whether the square of a row's gradient is finite in fp32, so that the row
    learns from it.
    """
    return grad_UD.square().sum(1).isfinite()


def regularized_update(
    rule: RowRule, weight_UD: Tensor, state: dict[str, Tensor], grad_UD: Tensor, lr: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the new weights by `rule.update`, with its regularization: the definition of a row
    update.

    A row whose gradient's square is not finite in fp32 (a number above 1e19, infinity, NaN) stays
    as it is, and so does its state. A sum of squares that is infinite once would stay so, and the
    row would never learn again. The arguments are those of `RowRule.update`.
    """
    extra = rule.regularization
    before_UD = weight_UD
    before = state
    is_finite_U = learns(grad_UD)
    if extra.clip_norm:
        grad_UD = _limit_norm(grad_UD, extra.clip_norm)
    if extra.weight_decay and extra.decay == "l2":
        grad_UD = grad_UD + extra.weight_decay * weight_UD
    if extra.weight_decay and extra.decay == "decoupled":
        weight_UD = weight_UD * (1 - lr * extra.weight_decay)
    weight_UD, state = rule.update(weight_UD, state, grad_UD, lr)
    if extra.max_norm:
        weight_UD = _limit_norm(weight_UD, extra.max_norm)
    state = {name: _where(is_finite_U, new, before[name]) for name, new in state.items()}
    return _where(is_finite_U, weight_UD, before_UD), state


def _where(rows_U: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """The new values of these rows, and the old values of all others, [U, ...]."""
    return torch.where(rows_U.view(-1, *[1] * (new.dim() - 1)), new, old)


def _limit_norm(rows_UD: Tensor, most: float) -> Tensor:
    norm_U1 = rows_UD.norm(dim=1, keepdim=True)
    return rows_UD * (most / norm_U1).where(norm_U1 > most, 1.0)
