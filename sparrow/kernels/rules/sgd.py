from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sparrow.core.errors import require


@dataclass(frozen=True, kw_only=True)
class Config:
    """Stochastic gradient descent: w -= lr * g."""

    lr: float = 0.1

    def __post_init__(self) -> None:
        require(least=0, lr=self.lr)

    def init_state(self, rows: int, dim: int) -> dict[str, Tensor]:
        """No state."""
        return {}

    def update(
        self, weight_UD: Tensor, state: dict[str, Tensor], grad_UD: Tensor, lr: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """New weights [U, D]; see `RowRule.update`."""
        return weight_UD - lr * grad_UD, {}

    def cpp(self) -> tuple[str, list[float]]:
        """See `RowRule.cpp`."""
        return "sgd", []
