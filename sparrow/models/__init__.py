"""One file per architecture, written for one device. File `x.py` is the model named "x" in a run's `[model]`.

A model is a Module whose `forward(batch)` gives logits [B, T], one for each label: all that training sees. Around it
`Offset` makes them begin at the base rate.
"""

from __future__ import annotations

from typing import Protocol

from torch import nn

from sparrow.embeddings import TableChoices
from sparrow.features.schema import Schema
from sparrow.models._inputs import History
from sparrow.models._offset import Offset


class ModelConfig(Protocol):
    """What a model file's `Config`, a frozen dataclass, offers."""

    def build(self, schema: Schema, tables: TableChoices) -> nn.Module:
        """The model for a log, with embedding tables as chosen."""
        ...


__all__ = ["History", "ModelConfig", "Offset"]
