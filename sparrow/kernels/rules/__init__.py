"""How a row learns. One file per rule: its `Config` is the rule, and `update` its definition.

Adding a rule is adding its file here and, for speed, in C++, in embedding_bag/cpu: a `RuleKind`
(loop_types.h), a row of `known` (arguments.cpp), a function and its `case` in `apply` (loops.h). Without them it runs
with impl="reference". What rules share is in `_shared.py`.
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
    """What any rule can be given on top; it acts on the rows of a batch and leaves all others alone.

    weight_decay: towards zero, "l2" by adding weight_decay * w to the gradient, "decoupled" by w *= 1 - lr *
    weight_decay before the rule (AdamW, arXiv 1711.05101). clip_norm: a row's gradient is scaled down to this norm
    before anything else. max_norm: its weights are, after everything else. 0 turns each off.
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
        """Learning rate before the schedule."""
        ...

    @property
    def regularization(self) -> Regularization:
        """Weight decay and limits."""
        ...

    def fields(self, dim: int) -> dict[str, Field]:
        """What a row of D = dim columns keeps beside its values, by name; float32."""
        ...

    def update(
        self, weight_UD: Tensor, state: dict[str, Tensor], grad_UD: Tensor, lr: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """New weights [U, D] and state [U, ...] of gathered rows, from their summed gradients; changes nothing.

        lr: float32 tensor with one element, so that a schedule never recompiles. Without the regularization.
        """
        ...

    def cpp(self) -> tuple[str, Mapping[str, float]]:
        """Name of the C++ row function, and those of the numbers eps, beta1 and beta2 that it takes."""
        ...


def init_state(rule: RowRule, rows: int, dim: int) -> dict[str, Tensor]:
    """The state of so many rows before any update: field -> float32 [rows] or [rows, entries]."""
    return {name: torch.full(field.empty(rows), field.first) for name, field in rule.fields(dim).items()}


def regularized_update(
    rule: RowRule, weight_UD: Tensor, state: dict[str, Tensor], grad_UD: Tensor, lr: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """`rule.update` inside its regularization: the definition of a row update.

    A row whose gradient's square is not finite in fp32 (a number above 1e19, infinity, NaN) stays as it is, its state
    too: a sum of squares that is infinite once would stay so, and the row would never learn again.
    """
    extra = rule.regularization
    before_UD = weight_UD
    before = state
    is_finite_U = grad_UD.square().sum(1).isfinite()
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
    """The new values of these rows, and the old ones of all others; [U, ...]."""
    return torch.where(rows_U.view(-1, *[1] * (new.dim() - 1)), new, old)


def _limited(rows_UD: Tensor, most: float) -> Tensor:
    norm_U1 = rows_UD.norm(dim=1, keepdim=True)
    return rows_UD * (most / norm_U1).where(norm_U1 > most, 1.0)


__all__ = ["Regularization", "RowRule", "init_state", "regularized_update"]
