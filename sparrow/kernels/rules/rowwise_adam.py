from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from sparrow.core.errors import require
from sparrow.kernels.formats import Field
from sparrow.kernels.rules import Regularization


@dataclass(frozen=True, kw_only=True)
class Config:
    """Adam with one second moment per row, of the mean square gradient: `adam` at half its state.

    Lazy, and with a count of updates per row, as `adam` is.
    """

    lr: float = 0.001
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    regularization: Regularization = field(default_factory=Regularization)

    def __post_init__(self) -> None:
        require(least=0, lr=self.lr)
        require(least=0, most=1 - 1e-12, beta1=self.beta1, beta2=self.beta2)
        require(above=0, eps=self.eps)

    def fields(self, dim: int) -> dict[str, Field]:
        """first [D], second: the moments; updates: how many the row had."""
        return {"first": Field(width=dim, across="cut"), "second": Field(), "updates": Field()}

    def update(
        self, weight_UD: Tensor, state: dict[str, Tensor], grad_UD: Tensor, lr: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """New weights and state; see `RowRule.update`."""
        updates_U = state["updates"] + 1
        bias1_U, bias2_U = ((1 - torch.pow(beta, updates_U.double())).float() for beta in (self.beta1, self.beta2))
        first_UD = state["first"] * self.beta1 + grad_UD * (1 - self.beta1)
        second_U = state["second"] * self.beta2 + grad_UD.square().mean(dim=1) * (1 - self.beta2)
        rate_U = lr / bias1_U / (second_U.sqrt() / bias2_U.sqrt() + self.eps)
        weight_UD = weight_UD - rate_U[:, None] * first_UD
        return weight_UD, {"first": first_UD, "second": second_U, "updates": updates_U}

    def cpp(self) -> tuple[str, dict[str, float]]:
        """See `RowRule.cpp`."""
        return "rowwise_adam", {"eps": self.eps, "beta1": self.beta1, "beta2": self.beta2}
