from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from sparrow.core.errors import require
from sparrow.kernels.formats import Field
from sparrow.kernels.rules import Regularization


@dataclass(frozen=True, kw_only=True)
class Config:
    """Adam (arXiv 1412.6980), lazily: rows that a batch does not use stay as they are, moments included.

    Each row counts its own updates to undo the moments' bias, so that a rare row's first step is as long as any
    other's; where every batch uses every row this is torch's Adam.
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
        """first, second [D]: the moments; updates: how many the row had."""
        return {"first": Field(width=dim, across="cut"), "second": Field(width=dim, across="cut"), "updates": Field()}

    def update(
        self, weight_UD: Tensor, state: dict[str, Tensor], grad_UD: Tensor, lr: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """New weights and state; see `RowRule.update`."""
        updates_U = state["updates"] + 1
        bias1_U, bias2_U = ((1 - torch.pow(beta, updates_U.double())).float() for beta in (self.beta1, self.beta2))
        first_UD = state["first"] * self.beta1 + grad_UD * (1 - self.beta1)
        second_UD = state["second"] * self.beta2 + grad_UD.square() * (1 - self.beta2)
        scale_UD = second_UD.sqrt() / bias2_U.sqrt()[:, None] + self.eps
        weight_UD = weight_UD - (lr / bias1_U)[:, None] * first_UD / scale_UD
        return weight_UD, {"first": first_UD, "second": second_UD, "updates": updates_U}

    def cpp(self) -> tuple[str, dict[str, float]]:
        """See `RowRule.cpp`."""
        return "adam", {"eps": self.eps, "beta1": self.beta1, "beta2": self.beta2}
