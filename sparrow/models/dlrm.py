from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from sparrow.core import Batch, UserError
from sparrow.embeddings import TableChoices
from sparrow.features.schema import Schema
from sparrow.interactions.dot import DotInteraction
from sparrow.layers.mlp import MLP, Head, require_sizes
from sparrow.layers.precision import to_compute
from sparrow.models._inputs import History, Ids, tasks


@dataclass(frozen=True, kw_only=True)
class Config:
    """dim: the size of every embedding and of the bottom MLP's output. bottom, top: hidden sizes of
    the MLPs.

    If there are dense columns, dim is appended to bottom. The top MLP ends in a logit for each
    label. dropout: of it, see `MLP`. history: lists that transformers read.
    """

    dim: int = 16
    bottom: tuple[int, ...] = (64,)
    top: tuple[int, ...] = (64, 32)
    dropout: float = 0.0
    history: History = field(default_factory=History)

    def __post_init__(self) -> None:
        require_sizes(dim=(self.dim,), bottom=self.bottom, top=self.top)

    def larger(self) -> Config:
        """Returns the next size: MLPs of twice the width, the top one a layer deeper too."""
        top = tuple(2 * size for size in self.top)
        return replace(self, bottom=tuple(2 * size for size in self.bottom), top=(*top[:1], *top))

    def build(self, schema: Schema, tables: TableChoices) -> nn.Module:
        """Returns the model for a log."""
        return DLRM(schema, self, tables)


class DLRM(nn.Module):
    """Bottom MLP on the dense columns, dot products of all pairs of vectors, top MLP (arXiv
    1906.00091).

    tables: see `TableChoices`. It raises UserError for a log with fewer than two vectors to pair,
    and the UserErrors of `Ids`.
    """

    def __init__(self, schema: Schema, config: Config, tables: TableChoices) -> None:
        super().__init__()
        self.dim = config.dim
        self.ids = Ids(schema, config.dim, tables, config.history)
        self.bottom = (
            MLP(len(schema.numbers), [*config.bottom, config.dim]) if schema.dense else None
        )
        self.interaction = DotInteraction()
        vectors = self.ids.vectors + (self.bottom is not None)
        if vectors < 2:
            raise UserError(
                "model: DLRM pairs vectors and this log has one: each id column has one, all"
                " numeric columns together one; use logistic or dcnv2"
            )
        pairs = DotInteraction.out_features(vectors)
        self.top = MLP(
            pairs + (config.dim if self.bottom is not None else 0), config.top, config.dropout
        )
        self.head = Head(self.top.out_features, tasks(schema))

    def forward(self, batch: Batch) -> Tensor:
        """Returns logits [B, T]."""
        # while sharded vectors travel
        dense_BD = None if self.bottom is None else self.bottom(batch.dense_BC)
        vectors_BE = to_compute(self.ids(batch))
        if dense_BD is None:
            return self.head(self.top(self.interaction(vectors_BE.unflatten(1, (-1, self.dim)))))
        pairs = self.interaction(torch.cat([dense_BD, vectors_BE], 1).unflatten(1, (-1, self.dim)))
        return self.head(self.top(torch.cat([dense_BD, pairs], 1)))
