from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from sparrow.kernels.formats import Field
from sparrow.kernels.rules import Regularization
from sparrow.kernels.rules._shared import require_ranges


@dataclass(frozen=True, kw_only=True)
class Config:
    """AdaGrad, one accumulator per weight: sum += g^2; w -= lr / (sqrt(sum) + eps) * g (Duchi et
    al., JMLR 2011).

    initial: the accumulators' first value.
    """

    lr: float = 0.05
    eps: float = 1e-8
    initial: float = 0.0
    regularization: Regularization = field(default_factory=Regularization)

    def __post_init__(self) -> None:
        require_ranges(self)

    def fields(self, dim: int) -> dict[str, Field]:
        """sum [D]: the squared gradients so far."""
        return {"sum": Field(width=dim, first=self.initial, across="cut")}

    def update(
        self, weight_UD: Tensor, state: dict[str, Tensor], grad_UD: Tensor, lr: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """New weights and sum [U, D]; see `RowRule.update`."""
        sum_UD = state["sum"] + grad_UD.square()
        return weight_UD - lr / (sum_UD.sqrt() + self.eps) * grad_UD, {"sum": sum_UD}

    def cpp(self) -> tuple[str, dict[str, float]]:
        """See `RowRule.cpp`."""
        return "adagrad", {"eps": self.eps}
