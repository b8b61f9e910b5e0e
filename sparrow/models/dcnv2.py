from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor, nn

from sparrow.core import Batch
from sparrow.core.errors import require
from sparrow.embeddings import TableChoices
from sparrow.features.schema import Schema
from sparrow.interactions.cross import CrossNet
from sparrow.layers.mlp import MLP, Head, require_sizes
from sparrow.layers.numeric import NumericEmbedding
from sparrow.layers.precision import to_compute
from sparrow.models._inputs import History, Ids, Numbers, tasks


@dataclass(frozen=True, kw_only=True)
class Config:
    """dim: the size of every embedding. cross_layers: how many. rank: of their weights, see
    `CrossNet`. deep: hidden sizes of the MLP.

    embed_dense: each dense column has a vector of dim too, and not only its number. bottom: sizes
    of an MLP whose output replaces the dense columns (as in MLPerf's DLRM-DCNv2); embed_dense is
    then ignored.
    structure: "stacked" puts the MLP on the cross layers' output, "parallel" beside them (figure 1
    of the paper). dropout: of the MLP `deep`, see `MLP`.
    history: lists that transformers read.
    """

    dim: int = 16
    cross_layers: int = 3
    rank: int | None = None
    deep: tuple[int, ...] = (128, 64)
    structure: Literal["stacked", "parallel"] = "parallel"
    embed_dense: bool = True
    bottom: tuple[int, ...] = ()
    dropout: float = 0.0
    history: History = field(default_factory=History)

    def __post_init__(self) -> None:
        require_sizes(dim=(self.dim,), deep=self.deep, bottom=self.bottom)
        require(least=1, cross_layers=self.cross_layers, rank=self.rank)

    def larger(self) -> Config:
        """Returns the next size: one more cross layer, its rank and the MLP's width doubled."""
        deep = tuple(2 * size for size in self.deep)
        rank = self.rank and 2 * self.rank
        return replace(self, cross_layers=self.cross_layers + 1, rank=rank, deep=deep)

    def build(self, schema: Schema, tables: TableChoices) -> nn.Module:
        """Returns the model for a log."""
        return DCNv2(schema, self, tables)


class DCNv2(nn.Module):
    """Cross layers and an MLP over the concatenated embeddings and dense columns (arXiv
    2008.13535).

    tables: see `TableChoices`. It raises the UserErrors of `Ids`.
    """

    def __init__(self, schema: Schema, config: Config, tables: TableChoices) -> None:
        super().__init__()
        self.ids = Ids(schema, config.dim, tables, config.history)
        self.bottom = (
            MLP(len(schema.numbers), config.bottom) if config.bottom and schema.dense else None
        )
        is_embedded = config.embed_dense and self.bottom is None
        self.numbers = Numbers(schema, config.dim if is_embedded else None)
        self.numeric = NumericEmbedding(self.numbers.columns, config.dim) if is_embedded else None
        features = len(schema.numbers)
        if self.numeric is not None:
            features = self.numeric.out_features + config.dim * self.numbers.vectors
        features = self.bottom.out_features if self.bottom else features
        features += config.dim * self.ids.vectors
        self.cross = CrossNet(features, config.cross_layers, config.rank)
        self.deep = MLP(features, config.deep, config.dropout)
        self.structure = config.structure
        width = self.deep.out_features + (features if config.structure == "parallel" else 0)
        self.head = Head(width, tasks(schema))

    def forward(self, batch: Batch) -> Tensor:
        """Returns logits [B, T]."""
        ids_BX = self.ids(batch)
        if self.numeric is None:
            dense_BC = batch.dense_BC if self.bottom is None else self.bottom(batch.dense_BC)
            x = narrow = torch.cat([to_compute(dense_BC), to_compute(ids_BX)], 1)
            fold = None
        else:
            x, narrow = self.numeric(*self.numbers(batch.dense_BC, ids_BX))
            fold = self.numeric.fold
        crossed = self.cross(x, narrow, fold)
        if self.structure == "stacked":
            return self.head(self.deep(crossed))
        return self.head(crossed, self.deep(narrow, fold) if len(self.deep.layers) else x)
