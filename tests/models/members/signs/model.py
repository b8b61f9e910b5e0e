"""Reads the ids of a row and predicts its labels, and the signs of its larger numbers, as a
language model predicts tokens: rows have more of them or fewer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparrow.core import Batch
from sparrow.embeddings import TableChoices
from sparrow.features.schema import Schema
from sparrow.layers.mlp import Head
from sparrow.metrics import Metric, declare
from sparrow.models._inputs import History, Ids, tasks

declare(
    Metric(
        name="perplexity",
        title="perplexity of signs",
        short="perplexity",
        meaning="Perplexity is 2 where signs are guessed.",
        better="lower",
        measures=("sign_loss", "signs"),
        value=lambda loss, signs: (loss / signs).exp(),
        is_logged=True,
        is_monitored=True,
        is_headline=True,
    ),
    Metric(
        name="signs_a_row",
        title="signs a row",
        better="higher",
        measures=("signs", "rows"),
        value=lambda signs, rows: signs / rows,
    ),
)


@dataclass(frozen=True, kw_only=True)
class Config:
    """dim: D of the vectors."""

    dim: int = 4
    history: History = field(default_factory=History)

    def build(self, schema: Schema, tables: TableChoices) -> nn.Module:
        """Returns the model for a log."""
        return Signs(schema, self, tables)


class Signs(nn.Module):
    """See above. It is `BringsLoss` and `BringsMeasures`."""

    measures = ("sign_loss", "signs", "rows")

    def __init__(self, schema: Schema, config: Config, tables: TableChoices) -> None:
        super().__init__()
        self.ids = Ids(schema, config.dim, tables, config.history)
        width = config.dim * len(schema.sparse)
        self.head = Head(width, tasks(schema))
        self.signs = Head(width, len(schema.numbers))

    def forward(self, batch: Batch) -> Tensor:
        """Returns logits [B, T]."""
        x_BD = self.ids(batch)
        numbers_BC = batch.dense_BC
        loss_BC = F.softplus(-self.signs(x_BD) * numbers_BC.sign())
        is_token_BC = numbers_BC.abs() > 0.5
        self.loss_B = (loss_BC * is_token_BC).sum(1)
        self.count_B = is_token_BC.sum(1)
        return self.head(x_BD)

    def loss(
        self, logits_BT: Tensor, batch: Batch, of_run: Callable[[Tensor, Batch], Tensor]
    ) -> Tensor:
        """Returns the run's loss and the mean loss of signs of a row."""
        return of_run(logits_BT, batch) + self.loss_B.sum() / max(len(self.loss_B), 1)

    def measure(self) -> Tensor:
        """Returns [B, 3]."""
        rows_B = torch.ones_like(self.loss_B)
        return torch.stack([self.loss_B.detach(), self.count_B, rows_B], 1)
