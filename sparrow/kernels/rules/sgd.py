from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from sparrow.kernels.formats import Field
from sparrow.kernels.rules import Regularization
from sparrow.kernels.rules._shared import require_ranges


@dataclass(frozen=True, kw_only=True)
class Config:
    """Stochastic gradient descent: w -= lr * g."""

    lr: float = 0.1
    regularization: Regularization = field(default_factory=Regularization)

    def __post_init__(self) -> None:
        require_ranges(self)

    def fields(self, dim: int) -> dict[str, Field]:
        """No state."""
        return {}

    def update(
        self, weight_UD: Tensor, state: dict[str, Tensor], grad_UD: Tensor, lr: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """New weights [U, D]; see `RowRule.update`."""
        return weight_UD - lr * grad_UD, {}

    def cpp(self) -> tuple[str, dict[str, float]]:
        """See `RowRule.cpp`."""
        return "sgd", {}
