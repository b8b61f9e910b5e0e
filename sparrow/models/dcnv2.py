from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from sparrow.core import Batch
from sparrow.core.errors import require
from sparrow.data.schema import Schema
from sparrow.interactions import CrossNet
from sparrow.kernels.rules import RowRule
from sparrow.layers import MLP, Linear, require_sizes
from sparrow.losses import binary_cross_entropy
from sparrow.models._inputs import pooled, tables_for


@dataclass(frozen=True, kw_only=True)
class Config:
    """dim: of every embedding. cross_layers, rank: see `CrossNet`. deep: hidden sizes of the MLP.

    structure: "stacked" puts the MLP on the cross layers' output, "parallel" beside them (figure 1 of the paper).
    """

    dim: int = 16
    cross_layers: int = 3
    rank: int | None = None
    deep: tuple[int, ...] = (128, 64)
    structure: Literal["stacked", "parallel"] = "stacked"

    def __post_init__(self) -> None:
        require_sizes(dim=(self.dim,), deep=self.deep)
        require(least=1, cross_layers=self.cross_layers, rank=self.rank)

    def build(self, schema: Schema, rule: RowRule, seed: int) -> nn.Module:
        """The model for a log."""
        return DCNv2(schema, self, rule=rule, seed=seed)


class DCNv2(nn.Module):
    """Cross layers and an MLP over the concatenated embeddings and dense columns (arXiv 2008.13535).

    rule, seed: of the embedding tables.
    """

    def __init__(self, schema: Schema, config: Config, *, rule: RowRule, seed: int = 0) -> None:
        super().__init__()
        self.tables = tables_for(schema, config.dim, rule, seed)
        features = len(schema.dense) + config.dim * len(schema.sparse)
        self.cross = CrossNet(features, config.cross_layers, config.rank)
        self.deep = MLP(features, config.deep)
        self.structure = config.structure
        self.head = Linear(self.deep.out_features + (features if config.structure == "parallel" else 0), 1)

    def forward(self, batch: Batch) -> Tensor:
        """Logits [B, 1]."""
        x = torch.cat([batch.dense_BC, pooled(self.tables, batch)], 1)
        crossed = self.cross(x)
        if self.structure == "stacked":
            return self.head(self.deep(crossed))
        return self.head(torch.cat([crossed, self.deep(x)], 1))

    def loss(self, batch: Batch) -> Tensor:
        """Mean logloss."""
        return binary_cross_entropy(self(batch), batch)

    def score(self, batch: Batch) -> Tensor:
        """Probabilities [B, 1]."""
        return torch.sigmoid(self(batch))
