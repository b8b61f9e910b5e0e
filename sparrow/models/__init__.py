"""One file per architecture, written for one device. File `x.py` is the model named "x" in a run's `[model]`."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor, nn

from sparrow.core import Batch
from sparrow.data.schema import Schema
from sparrow.kernels.rules import RowRule


class Model(Protocol):
    """All that training sees."""

    def loss(self, batch: Batch) -> Tensor:
        """A scalar to differentiate; UserError when the batch has no labels."""
        ...

    def learn(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The same scalar, and the probabilities [B, T], without a graph, from before the step that it leads to."""
        ...

    def score(self, batch: Batch) -> Tensor:
        """Click probabilities [B, T]."""
        ...


class ModelConfig(Protocol):
    """What a model file's `Config`, a frozen dataclass, offers."""

    def build(self, schema: Schema, rule: RowRule, seed: int) -> nn.Module:
        """The model (a Module that is a `Model`) for a log; rule and seed are for its embedding tables."""
        ...


__all__ = ["Model", "ModelConfig"]
