"""How a row learns. One file per rule: its `Config` is the rule, and `update` its definition.

To add a rule, add its file here. For speed add it to the C++ in embedding_bag/cpu too: a `RuleKind`
(loop_types.h), a row of `known` (arguments.cpp), a function and its `case` in `apply` (loops.h).
For a GPU add it to embedding_bag/gpu: a name in `RULES` (groups.py) and its branch of `apply_rule`
(rules.py). Without these it runs with impl="reference". What rules share is in `_shared.py` and
`_adam.py`.
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
    """What every rule takes in addition. It acts only on the rows that a batch uses. 0 turns each
    part off.

    weight_decay: pulls weights towards zero. decay: "l2" adds weight_decay * w to the gradient;
    "decoupled" multiplies w by 1 - lr * weight_decay before the rule (AdamW, arXiv 1711.05101).
    clip_norm: a row's gradient is scaled down to this norm, before anything else. max_norm: a row's
    weights are scaled down to this norm, after everything else.
    """

    weight_decay: float = 0.0
    decay: Literal["l2", "decoupled"] = "l2"
    clip_norm: float = 0.0
    max_norm: float = 0.0

    def __post_init__(self) -> None:
        require(
            least=0,
            weight_decay=self.weight_decay,
            clip_norm=self.clip_norm,
            max_norm=self.max_norm,
        )


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
        """Returns the new weights [U, D] and state [U, ...] of U rows, without the regularization;
        changes nothing.

        Args:
            weight_UD: the rows' weights, float32.
            state: field -> [U] or [U, entries].
            grad_UD: the sum of each row's gradients, float32.
            lr: the learning rate, a float32 tensor with one element, so that a schedule never
                recompiles.
        """
        ...

    def cpp(self) -> tuple[str, Mapping[str, float]]:
        """Returns the name of the C++ row function, and its numbers by name, of eps, beta1 and
        beta2.
        """
        ...


def init_state(rule: RowRule, rows: int, dim: int) -> dict[str, Tensor]:
    """Returns the state of rows before any update: field -> float32 [rows] or [rows, entries]."""
    return {
        name: torch.full(field.shape(rows), field.first) for name, field in rule.fields(dim).items()
    }


__all__ = ["Regularization", "RowRule", "init_state"]
