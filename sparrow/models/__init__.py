"""One file per architecture, written for one device. File `x.py` is the model named "x" in a run's `[model]`.

A model is a Module whose `forward(batch)` gives logits [B, T], one for each label: all that training sees. Around it
`Offset` makes them begin at the base rate.
"""

from __future__ import annotations

from typing import Protocol

from torch import nn

from sparrow.features.schema import Schema
from sparrow.kernels.rules import RowRule
from sparrow.models._inputs import History
from sparrow.models._offset import Offset


class ModelConfig(Protocol):
    """What a model file's `Config`, a frozen dataclass, offers."""

    def build(self, schema: Schema, rule: RowRule, seed: int) -> nn.Module:
        """The model for a log; rule and seed are for its embedding tables."""
        ...


__all__ = ["History", "ModelConfig", "Offset"]
