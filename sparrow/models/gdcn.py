from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from sparrow.core import Batch
from sparrow.core.errors import require
from sparrow.embeddings import TableChoices
from sparrow.features.schema import Schema
from sparrow.layers.mlp import MLP, Head, Linear, require_sizes
from sparrow.layers.precision import to_compute
from sparrow.models._inputs import History, tasks
from sparrow.models._vectors import Vectors


@dataclass(frozen=True, kw_only=True)
class Config:
    """dim: the size of a feature's vector. layers: how many gated cross layers. deep: hidden sizes
    of the MLP.

    structure: "stacked" puts the MLP on the cross layers' output, "parallel" beside them. dropout:
    of it, see `MLP`. history: lists that transformers read.
    """

    dim: int = 16
    layers: int = 3
    deep: tuple[int, ...] = (128, 64)
    structure: Literal["stacked", "parallel"] = "parallel"
    dropout: float = 0.0
    history: History = field(default_factory=History)

    def __post_init__(self) -> None:
        require_sizes(dim=(self.dim,), deep=self.deep)
        require(least=1, layers=self.layers)

    def build(self, schema: Schema, tables: TableChoices) -> nn.Module:
        """Returns the model for a log."""
        return GDCN(schema, self, tables)


class GDCN(nn.Module):
    """Cross layers that weigh each interaction before they add it, and an MLP (GDCN, arXiv
    2311.04635).
    """

    def __init__(self, schema: Schema, config: Config, tables: TableChoices) -> None:
        super().__init__()
        self.vectors = Vectors(schema, config.dim, tables, config.history)
        features = self.vectors.features * config.dim
        self.layers = nn.ModuleList(_GatedCross(features) for _ in range(config.layers))
        self.deep = MLP(features, config.deep, config.dropout)
        self.is_parallel = config.structure == "parallel"
        self.head = Head(
            self.deep.out_features + (features if self.is_parallel else 0), tasks(schema)
        )

    def forward(self, batch: Batch) -> Tensor:
        """Returns logits [B, T]."""
        x0 = x = to_compute(self.vectors(batch).flatten(1))
        for layer in self.layers:
            x = layer(x0, x)
        return self.head(x, self.deep(x0)) if self.is_parallel else self.head(self.deep(x))


class _GatedCross(nn.Module):
    """x_0 * (W x + b) * sigmoid(V x) + x (equation 4)."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.cross = Linear(features, features)
        self.gate = Linear(features, features, bias=False)
        nn.init.zeros_(self.cross.bias)  # type: ignore[arg-type]

    def forward(self, x0: Tensor, x: Tensor) -> Tensor:
        return torch.addcmul(x, x0 * to_compute(self.cross(x)), torch.sigmoid(self.gate(x)))
