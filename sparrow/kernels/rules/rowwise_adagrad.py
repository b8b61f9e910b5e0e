from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from sparrow.kernels.formats import Field
from sparrow.kernels.rules import Regularization
from sparrow.kernels.rules._shared import require_ranges


@dataclass(frozen=True, kw_only=True)
class Config:
    """Row-wise AdaGrad, one accumulator per row: sum += mean(g^2); w -= lr / (sqrt(sum) + eps) * g.

    initial: the accumulators' first value. The mean is of the squares, never the square of the mean
    (Neo, arXiv 2104.05158).
    """

    lr: float = 0.05
    eps: float = 1e-8
    initial: float = 0.0
    regularization: Regularization = field(default_factory=Regularization)

    def __post_init__(self) -> None:
        require_ranges(self)

    def fields(self, dim: int) -> dict[str, Field]:
        """sum: the mean square gradients so far."""
        return {"sum": Field(first=self.initial)}

    def update(
        self, weight_UD: Tensor, state: dict[str, Tensor], grad_UD: Tensor, lr: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """New weights [U, D] and sum [U]; see `RowRule.update`."""
        sum_U = state["sum"] + grad_UD.square().mean(dim=1)
        rate_U = lr / (sum_U.sqrt() + self.eps)
        return weight_UD - rate_U[:, None] * grad_UD, {"sum": sum_U}

    def cpp(self) -> tuple[str, dict[str, float]]:
        """See `RowRule.cpp`."""
        return "rowwise_adagrad", {"eps": self.eps}
