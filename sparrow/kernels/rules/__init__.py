"""How a row learns. One file per rule: its `Config` is the rule, and `update` its definition.

To add a rule, add its file here. For speed add it to the C++ in embedding_bag/cpu too: a `RuleKind` (loop_types.h), a
row of `known` (arguments.cpp), a function and its `case` in `apply` (loops.h). For a GPU add it to embedding_bag/gpu: a
name in `RULES` (groups.py) and its branch of `apply_rule` (rules.py). Without these it runs with impl="reference". What
rules share is in `_shared.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from sparrow.core.errors import require
from sparrow.kernels.formats import Field


@dataclass(frozen=True, kw_only=True)
class Regularization:
    """What every rule takes in addition. It acts only on the rows that a batch uses. 0 turns each part off.

    weight_decay: pulls weights towards zero. decay: "l2" adds weight_decay * w to the gradient; "decoupled" multiplies
    w by 1 - lr * weight_decay before the rule (AdamW, arXiv 1711.05101). clip_norm: a row's gradient is scaled down to
    this norm, before anything else. max_norm: a row's weights are scaled down to this norm, after everything else.
    """

    weight_decay: float = 0.0
    decay: Literal["l2", "decoupled"] = "l2"
    clip_norm: float = 0.0
    max_norm: float = 0.0

    def __post_init__(self) -> None:
        require(least=0, weight_decay=self.weight_decay, clip_norm=self.clip_norm, max_norm=self.max_norm)


class RowRule(Protocol):
    """What a member's `Config` offers."""

    @property
    def lr(self) -> float:
        """The learning rate before the schedule."""
        ...

    @property
    def regularization(self) -> Regularization:
        """Weight decay and limits."""
        ...

    def fields(self, dim: int) -> dict[str, Field]:
        """Returns what a row of D = dim columns keeps beside its values, by name; float32."""
        ...

    def update(
        self, weight_UD: Tensor, state: dict[str, Tensor], grad_UD: Tensor, lr: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the new weights [U, D] and state [U, ...] of U rows, without the regularization; changes nothing.

        Args:
            weight_UD: the rows' weights, float32.
            state: field -> [U] or [U, entries].
            grad_UD: the sum of each row's gradients, float32.
            lr: the learning rate, a float32 tensor with one element, so that a schedule never recompiles.
        """
        ...

    def cpp(self) -> tuple[str, Mapping[str, float]]:
        """Returns the name of the C++ row function, and its numbers by name, of eps, beta1 and beta2."""
        ...


def init_state(rule: RowRule, rows: int, dim: int) -> dict[str, Tensor]:
    """Returns the state of rows before any update: field -> float32 [rows] or [rows, entries]."""
    return {name: torch.full(field.shape(rows), field.first) for name, field in rule.fields(dim).items()}


def learns(grad_UD: Tensor) -> Tensor:
    """Returns bool [U]: whether the square of a row's gradient is finite in fp32, so that the row learns from it."""
    return grad_UD.square().sum(1).isfinite()


def regularized_update(
    rule: RowRule, weight_UD: Tensor, state: dict[str, Tensor], grad_UD: Tensor, lr: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns what `rule.update` returns, with its regularization: the definition of a row update.

    A row whose gradient's square is not finite in fp32 (a number above 1e19, infinity, NaN) stays as it is, and so does
    its state. A sum of squares that is infinite once would stay so, and the row would never learn again. The arguments
    are those of `RowRule.update`.
    """
    extra = rule.regularization
    before_UD = weight_UD
    before = state
    is_finite_U = learns(grad_UD)
    if extra.clip_norm:
        grad_UD = _limited(grad_UD, extra.clip_norm)
    if extra.weight_decay and extra.decay == "l2":
        grad_UD = grad_UD + extra.weight_decay * weight_UD
    if extra.weight_decay and extra.decay == "decoupled":
        weight_UD = weight_UD * (1 - lr * extra.weight_decay)
    weight_UD, state = rule.update(weight_UD, state, grad_UD, lr)
    if extra.max_norm:
        weight_UD = _limited(weight_UD, extra.max_norm)
    state = {name: _where(is_finite_U, new, before[name]) for name, new in state.items()}
    return _where(is_finite_U, weight_UD, before_UD), state


def _where(rows_U: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """The new values of these rows, and the old values of all others, [U, ...]."""
    return torch.where(rows_U.view(-1, *[1] * (new.dim() - 1)), new, old)


def _limited(rows_UD: Tensor, most: float) -> Tensor:
    norm_U1 = rows_UD.norm(dim=1, keepdim=True)
    return rows_UD * (most / norm_U1).where(norm_U1 > most, 1.0)


__all__ = ["Regularization", "RowRule", "init_state", "learns", "regularized_update"]
