"""How dense weights learn. One file per optimizer: its `Config.build(parameters)` returns a torch
optimizer.

Imports: features, layers, losses, metrics and below. Imported by: models, sharding, checkpoint and
above.
"""

from collections.abc import Iterable
from typing import Protocol

from torch import nn
from torch.optim import Optimizer

from sparrow.optimizers._lean import lean


class OptimizerConfig(Protocol):
    """What a member's `Config` offers."""

    @property
    def lr(self) -> float:
        """The learning rate before the schedule."""
        ...

    def build(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """Returns the optimizer of these parameters."""
        ...


__all__ = ["OptimizerConfig", "lean"]
