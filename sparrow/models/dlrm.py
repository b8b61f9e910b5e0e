from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sparrow.core import Batch
from sparrow.data.schema import Schema
from sparrow.interactions import DotInteraction
from sparrow.kernels.rules import RowRule
from sparrow.layers import MLP, Linear
from sparrow.losses import binary_cross_entropy
from sparrow.models._inputs import pooled, tables_for


class DLRM(nn.Module):
    """Bottom MLP on the dense columns, dot products of all pairs of vectors, top MLP (arXiv 1906.00091).

    dim: of every embedding and of the bottom MLP's output, which is appended to `bottom` when there are dense columns.
    bottom, top: hidden sizes; the top MLP ends in one logit.
    """

    def __init__(
        self,
        schema: Schema,
        *,
        rule: RowRule,
        dim: int = 16,
        bottom: Sequence[int] = (64,),
        top: Sequence[int] = (64, 32),
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.tables = tables_for(schema, dim, rule, seed)
        self.bottom = MLP(len(schema.dense), [*bottom, dim]) if schema.dense else None
        self.interaction = DotInteraction()
        vectors = len(schema.sparse) + (self.bottom is not None)
        pairs = DotInteraction.out_features(vectors)
        self.top = MLP(pairs + (dim if self.bottom is not None else 0), top)
        self.head = Linear(self.top.out_features, 1)

    def forward(self, batch: Batch) -> Tensor:
        """Logits [B, 1]."""
        vectors = pooled(self.tables, batch)
        if self.bottom is None:
            return self.head(self.top(self.interaction(torch.stack(vectors, 1))))
        dense_BD = self.bottom(batch.dense_BC)
        pairs = self.interaction(torch.stack([dense_BD, *vectors], 1))
        return self.head(self.top(torch.cat([dense_BD, pairs], 1)))

    def loss(self, batch: Batch) -> Tensor:
        """Mean logloss."""
        return binary_cross_entropy(self(batch), batch)

    def score(self, batch: Batch) -> Tensor:
        """Probabilities [B, 1]."""
        return torch.sigmoid(self(batch))


@dataclass(frozen=True, kw_only=True)
class Config:
    """See `DLRM`."""

    dim: int = 16
    bottom: tuple[int, ...] = (64,)
    top: tuple[int, ...] = (64, 32)

    def build(self, schema: Schema, rule: RowRule, seed: int) -> nn.Module:
        """The model for a log."""
        return DLRM(schema, rule=rule, dim=self.dim, bottom=self.bottom, top=self.top, seed=seed)
