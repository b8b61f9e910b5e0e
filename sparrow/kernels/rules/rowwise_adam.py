from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from sparrow.kernels.formats import Field
from sparrow.kernels.rules import Regularization
from sparrow.kernels.rules._adam import adam_moments
from sparrow.kernels.rules._shared import require_ranges


@dataclass(frozen=True, kw_only=True)
class Config:
    """Adam with one second moment per row, that of the mean square gradient. It has half the state
    of `adam`.

    It is lazy and counts the updates of each row, as `adam` does.
    """

    lr: float = 0.001
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    regularization: Regularization = field(default_factory=Regularization)

    def __post_init__(self) -> None:
        require_ranges(self)

    def fields(self, dim: int) -> dict[str, Field]:
        """first [D], second: the moments; updates: how many the row had."""
        return {"first": Field(width=dim, across="cut"), "second": Field(), "updates": Field()}

    def update(
        self, weight_UD: Tensor, state: dict[str, Tensor], grad_UD: Tensor, lr: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """New weights and state; see `RowRule.update`."""
        mean_U = grad_UD.square().mean(dim=1)
        state, step_U, root_U = adam_moments(state, grad_UD, mean_U, lr, self.beta1, self.beta2)
        rate_U = step_U / (state["second"].sqrt() / root_U + self.eps)
        return weight_UD - rate_U[:, None] * state["first"], state

    def cpp(self) -> tuple[str, dict[str, float]]:
        """See `RowRule.cpp`."""
        return "rowwise_adam", {"eps": self.eps, "beta1": self.beta1, "beta2": self.beta2}
