from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from sparrow.kernels.formats import Field
from sparrow.kernels.rules import Regularization
from sparrow.kernels.rules._adam import adam_moments
from sparrow.kernels.rules._shared import require_ranges


@dataclass(frozen=True, kw_only=True)
class Config:
    """Lazy Adam (arXiv 1412.6980): rows that a batch does not use stay as they are, and so do their
    moments.

    Each row counts its own updates to correct the bias of the moments, so the first step of a rare
    row is as long as that of any other row. If every batch uses every row, this is torch's Adam.
    """

    lr: float = 0.001
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    regularization: Regularization = field(default_factory=Regularization)

    def __post_init__(self) -> None:
        require_ranges(self)

    def fields(self, dim: int) -> dict[str, Field]:
        """first, second [D]: the moments; updates: how many the row had."""
        return {
            "first": Field(width=dim, across="cut"),
            "second": Field(width=dim, across="cut"),
            "updates": Field(),
        }

    def update(
        self, weight_UD: Tensor, state: dict[str, Tensor], grad_UD: Tensor, lr: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """New weights and state; see `RowRule.update`."""
        squares_UD = grad_UD.square()
        state, step_U, root_U = adam_moments(state, grad_UD, squares_UD, lr, self.beta1, self.beta2)
        scale_UD = state["second"].sqrt() / root_U[:, None] + self.eps
        return weight_UD - step_U[:, None] * state["first"] / scale_UD, state

    def cpp(self) -> tuple[str, dict[str, float]]:
        """See `RowRule.cpp`."""
        return "adam", {"eps": self.eps, "beta1": self.beta1, "beta2": self.beta2}
