"""One file per architecture, written for one device. File `x.py` is the model named "x" in a run's
`[model]`.

A model is a Module whose `forward(batch)` returns logits [B, T], one for each label. Training sees
nothing else of it, but of one that is `Fitted`, `BringsLoss` or `metrics.BringsMeasures`. `Offset`
wraps it, so that first predictions lie at the base rate.

Imports: data, embeddings, interactions, optimizers and below. Imported by: trained and above.
"""

from __future__ import annotations

from typing import Protocol

from torch import nn

from sparrow.embeddings import TableChoices
from sparrow.features.schema import Schema
from sparrow.models._inputs import History
from sparrow.models._offset import MOST_FITTED, BringsLoss, Fitted, Offset, run_here


class ModelConfig(Protocol):
    """What a model file's `Config`, a frozen dataclass, offers."""

    def build(self, schema: Schema, tables: TableChoices) -> nn.Module:
        """Returns the model for a log.

        Args:
            schema: the columns of the log.
            tables: how its embedding tables are addressed, stored and trained.

        Raises:
            UserError: when the model does not fit the log.
        """
        ...


__all__ = ["MOST_FITTED", "BringsLoss", "Fitted", "History", "ModelConfig", "Offset", "run_here"]
