from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sparrow.core import Batch
from sparrow.embeddings import TableChoices
from sparrow.features.schema import Schema
from sparrow.models._inputs import pooled, tables_for, tasks


class LogisticRegression(nn.Module):
    """A weight for each dense column and each id: the baseline that knows no pairs of features.
    Weights begin at 0.

    The weight of an id counts times 4. Row-wise AdaGrad moves a row of D numbers by lr D^0.5. Times
    4, a row of one number moves as far as a row of 16, for which learning rates are usually chosen.
    """

    is_last = True  # see `put_layers`

    def __init__(self, schema: Schema, tables: TableChoices) -> None:
        super().__init__()
        self.tasks = tasks(schema)
        self.tables = tables_for(schema, self.tasks, tables, init_scale=0.0)
        self.weight_CT = nn.Parameter(torch.zeros(len(schema.numbers), self.tasks))
        self.bias_T = nn.Parameter(torch.zeros(self.tasks))

    def forward(self, batch: Batch) -> Tensor:
        """Returns logits [B, T]."""
        dense_BT = (batch.dense_BC[:, :, None] * self.weight_CT).sum(1) + self.bias_T
        return dense_BT + 4 * pooled(self.tables, batch).unflatten(1, (-1, self.tasks)).sum(1)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Logistic regression has nothing to choose."""

    def build(self, schema: Schema, tables: TableChoices) -> nn.Module:
        """Returns the model for a log."""
        return LogisticRegression(schema, tables)
