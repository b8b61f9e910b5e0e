from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn, optim

from sparrow.core.errors import require
from sparrow.optimizers._lean import lean


@dataclass(frozen=True, kw_only=True)
class Config:
    """AdaGrad, as MLPerf's DLRM-DCNv2 uses it.

    initial: the first value of the accumulators. weight_decay: L2, added to the gradient.
    """

    lr: float = 0.005
    eps: float = 1e-8
    initial: float = 0.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        require(
            least=0, lr=self.lr, eps=self.eps, initial=self.initial, weight_decay=self.weight_decay
        )

    def build(self, parameters: Iterable[nn.Parameter]) -> optim.Optimizer:
        """Returns torch's Adagrad."""
        return lean(optim.Adagrad)(
            parameters,
            lr=self.lr,
            eps=self.eps,
            initial_accumulator_value=self.initial,
            weight_decay=self.weight_decay,
        )
