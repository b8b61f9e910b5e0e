from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparrow.core import Batch
from sparrow.core.errors import require
from sparrow.embeddings import TableChoices
from sparrow.features.schema import Schema
from sparrow.layers.activation import Activation
from sparrow.layers.mlp import MLP, Head, Linear, require_sizes
from sparrow.layers.norm import LayerNorm
from sparrow.layers.precision import to_compute
from sparrow.models._inputs import History, tasks
from sparrow.models._vectors import Vectors


@dataclass(frozen=True, kw_only=True)
class Config:
    """dim: the size of a feature's vector. blocks: how many mask blocks. width: of a block's
    output. reduction: the width of the layer that makes a mask, divided by the width of the mask
    (the paper's reduction ratio). deep: hidden sizes of the MLP after the blocks.

    structure: "parallel" blocks all read the features; a "serial" block reads the output of the
    block before it. dropout: of the MLP after the blocks, see `MLP`. history: lists that
    transformers read.
    """

    dim: int = 16
    blocks: int = 3
    width: int = 64
    reduction: float = 1.0
    deep: tuple[int, ...] = (64,)
    structure: Literal["parallel", "serial"] = "parallel"
    dropout: float = 0.0
    history: History = field(default_factory=History)

    def __post_init__(self) -> None:
        require_sizes(dim=(self.dim,), width=(self.width,), deep=self.deep)
        require(least=1, blocks=self.blocks)
        require(above=0, reduction=self.reduction)

    def build(self, schema: Schema, tables: TableChoices) -> nn.Module:
        """Returns the model for a log."""
        return MaskNet(schema, self, tables)


class MaskNet(nn.Module):
    """Layers whose inputs are multiplied with masks made of all features (MaskNet, arXiv
    2102.07619).
    """

    def __init__(self, schema: Schema, config: Config, tables: TableChoices) -> None:
        super().__init__()
        self.vectors = Vectors(schema, config.dim, tables, config.history)
        self.norm = _VectorNorm(self.vectors.features, config.dim)
        features = self.vectors.features * config.dim
        self.is_parallel = config.structure == "parallel"
        inputs = (
            [features] * config.blocks
            if self.is_parallel
            else [features, *[config.width] * (config.blocks - 1)]
        )
        self.blocks = nn.ModuleList(_Block(features, size, config) for size in inputs)
        self.deep = MLP(
            config.width * (config.blocks if self.is_parallel else 1), config.deep, config.dropout
        )
        self.head = Head(self.deep.out_features, tasks(schema), scale=0.1)

    def forward(self, batch: Batch) -> Tensor:
        """Returns logits [B, T]."""
        vectors_BFD = self.vectors(batch)
        features = vectors_BFD.flatten(1)
        x = self.norm(vectors_BFD).flatten(1)
        if self.is_parallel:
            x = torch.cat([block(features, x) for block in self.blocks], 1)
        else:
            for block in self.blocks:
                x = block(features, x)
        return self.head(self.deep(x))


class _VectorNorm(LayerNorm):
    """A layer norm of each feature's vector, with a gain and a bias of its own (equation 9): [B,
    features, dim].
    """

    def __init__(self, features: int, dim: int) -> None:
        super().__init__(dim, elementwise_affine=False)
        self.weight = nn.Parameter(torch.ones(features, dim))
        self.bias = nn.Parameter(torch.zeros(features, dim))

    def forward(self, vectors_BFD: Tensor) -> Tensor:
        normed_BFD = F.layer_norm(vectors_BFD, vectors_BFD.shape[2:])
        if self.bias is None:
            return normed_BFD * self.weight
        return torch.addcmul(self.bias, normed_BFD, self.weight)


class _Block(nn.Module):
    """relu(norm(W (x * mask))); two layers make the mask from the features (section 3.3, equations
    5 to 8).
    """

    def __init__(self, features: int, inputs: int, config: Config) -> None:
        super().__init__()
        self.aggregate = MLP(features, [max(1, round(inputs * config.reduction))])
        self.project = Linear(self.aggregate.out_features, inputs)
        self.hidden = Linear(inputs, config.width, bias=False)
        self.norm = LayerNorm(config.width)
        self.activation = Activation()

    def forward(self, features: Tensor, x: Tensor) -> Tensor:
        mask = self.project(self.aggregate(features))
        out: Tensor = self.activation(self.norm(self.hidden(to_compute(x) * mask)))
        return out
