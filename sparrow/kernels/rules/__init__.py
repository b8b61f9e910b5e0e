"""How a row learns. One file per rule: its `Config` is the rule, and `update` its definition.

Adding a rule is adding its file here and, for speed, its row function to the C++ kernels (`embedding_bag/cpu.cpp`,
section "row rules"); without one the rule runs with impl="reference".
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class RowRule(Protocol):
    """What a member's `Config` offers."""

    @property
    def lr(self) -> float:
        """Learning rate before the schedule."""
        ...

    def init_state(self, rows: int, dim: int) -> dict[str, Tensor]:
        """A table's state before any update: field name -> float32 tensor, first dimension `rows`."""
        ...

    def update(
        self, weight_UD: Tensor, state: dict[str, Tensor], grad_UD: Tensor, lr: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """New weights [U, D] and state [U, ...] of gathered rows, from their summed gradients; changes nothing.

        lr: float32 tensor with one element, so that a schedule never recompiles.
        """
        ...

    def cpp(self) -> tuple[str, list[float]]:
        """Name of the C++ row function, and the numbers beside lr that it takes."""
        ...


__all__ = ["RowRule"]
