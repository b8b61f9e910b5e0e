from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn, optim

from sparrow.core.errors import require
from sparrow.optimizers._lean import lean


@dataclass(frozen=True, kw_only=True)
class Config:
    """Adam with decoupled weight decay (arXiv 1711.05101)."""

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        require(least=0, lr=self.lr, eps=self.eps, weight_decay=self.weight_decay)
        require(least=0, most=1 - 1e-9, beta1=self.beta1, beta2=self.beta2)

    def build(self, parameters: Iterable[nn.Parameter]) -> optim.Optimizer:
        """Returns torch's AdamW."""
        betas = (self.beta1, self.beta2)
        return lean(optim.AdamW)(
            parameters,
            lr=self.lr,
            betas=betas,
            eps=self.eps,
            weight_decay=self.weight_decay,
            fused=True,
        )
