from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sparrow.core import Batch
from sparrow.data.schema import Schema
from sparrow.kernels.rules import RowRule
from sparrow.losses import binary_cross_entropy
from sparrow.models._inputs import pooled, tables_for


class LogisticRegression(nn.Module):
    """A weight per dense column and per id: the baseline that knows no pairs. Weights begin at zero."""

    def __init__(self, schema: Schema, *, rule: RowRule, seed: int = 0) -> None:
        super().__init__()
        self.tables = tables_for(schema, 1, rule, seed, init_scale=0.0)
        self.weight_C = nn.Parameter(torch.zeros(len(schema.dense)))
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, batch: Batch) -> Tensor:
        """Logits [B, 1]."""
        dense_B1 = (batch.dense_BC * self.weight_C).sum(1, keepdim=True) + self.bias
        return dense_B1 + pooled(self.tables, batch).sum(1, keepdim=True)

    def loss(self, batch: Batch) -> Tensor:
        """Mean logloss."""
        return binary_cross_entropy(self(batch), batch)

    def score(self, batch: Batch) -> Tensor:
        """Probabilities [B, 1]."""
        return torch.sigmoid(self(batch))


@dataclass(frozen=True, kw_only=True)
class Config:
    """Logistic regression has nothing to choose."""

    def build(self, schema: Schema, rule: RowRule, seed: int) -> nn.Module:
        """The model for a log."""
        return LogisticRegression(schema, rule=rule, seed=seed)
