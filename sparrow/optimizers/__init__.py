"""Dense gradients -> step. One file per optimizer: its `Config.build(parameters)` gives a torch optimizer."""

from collections.abc import Iterable
from typing import Protocol

from torch import nn
from torch.optim import Optimizer

from sparrow.core import UserError


class OptimizerConfig(Protocol):
    """What a member's `Config` offers."""

    @property
    def lr(self) -> float:
        """Learning rate before the schedule."""
        ...

    def build(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """The optimizer over these parameters."""
        ...


def check(**positive: float) -> None:
    """UserError for a value that is not a number >= 0."""
    for name, value in positive.items():
        if not value >= 0:
            raise UserError(f"{name}: {value} is not >= 0; give a non-negative number")


__all__ = ["OptimizerConfig", "check"]
