from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn, optim

from sparrow.core.errors import require
from sparrow.optimizers._lean import lean


@dataclass(frozen=True, kw_only=True)
class Config:
    """Stochastic gradient descent, with or without momentum."""

    lr: float = 0.1
    momentum: float = 0.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        require(least=0, lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay)

    def build(self, parameters: Iterable[nn.Parameter]) -> optim.Optimizer:
        """Returns torch's SGD."""
        return lean(optim.SGD)(
            parameters, lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay
        )
