from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, nn

from sparrow.core import Batch, UserError
from sparrow.core.errors import require
from sparrow.embeddings import TableChoices
from sparrow.features.schema import Schema
from sparrow.layers.activation import Activation
from sparrow.layers.attention import Attention
from sparrow.layers.mlp import MLP, Head, Linear, require_sizes
from sparrow.models._inputs import History, tasks
from sparrow.models._vectors import Vectors


@dataclass(frozen=True, kw_only=True)
class Config:
    """dim: the size of a feature's vector. layers, heads: of self-attention. width: of all heads
    together.

    deep: hidden sizes of the MLP beside it; none makes it the plain AutoInt. dropout: of it, see
    `MLP`. history: lists that transformers read.
    """

    dim: int = 16
    layers: int = 2
    width: int = 32
    heads: int = 2
    deep: tuple[int, ...] = (128, 64)
    dropout: float = 0.0
    history: History = field(default_factory=History)

    def __post_init__(self) -> None:
        require_sizes(dim=(self.dim,), width=(self.width,), deep=self.deep)
        require(least=1, layers=self.layers, heads=self.heads)
        if self.width % self.heads:
            raise UserError(f"heads: {self.heads} do not divide width {self.width}; take a divisor")

    def build(self, schema: Schema, tables: TableChoices) -> nn.Module:
        """Returns the model for a log."""
        return AutoInt(schema, self, tables)


class AutoInt(nn.Module):
    """Features that attend to one another, and an MLP beside them (AutoInt+, arXiv 1810.11921)."""

    def __init__(self, schema: Schema, config: Config, tables: TableChoices) -> None:
        super().__init__()
        self.vectors = Vectors(schema, config.dim, tables, config.history)
        sizes = [config.dim, *[config.width] * config.layers]
        self.attention = nn.ModuleList(
            _Attention(size, config.width, config.heads) for size in sizes[:-1]
        )
        self.deep = (
            MLP(self.vectors.features * config.dim, config.deep, config.dropout)
            if config.deep
            else None
        )
        self.head = Head(
            self.vectors.features * config.width + (config.deep[-1] if config.deep else 0),
            tasks(schema),
        )

    def forward(self, batch: Batch) -> Tensor:
        """Returns logits [B, T]."""
        vectors_BFD = x = self.vectors(batch)
        for layer in self.attention:
            x = layer(x)
        parts = [x.flatten(1)]
        if self.deep:
            parts.append(self.deep(vectors_BFD.flatten(1)))
        return self.head(*parts)


class _Attention(nn.Module):
    """relu(attention + W x) over the features of an example (equations 5 to 8); the scores are not
    scaled there.
    """

    def __init__(self, inputs: int, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.size = width // heads
        self.attention = Attention()
        self.activation = Activation()
        self.qkvr = Linear(inputs, 4 * width, bias=False)
        # as four separate layers would begin
        nn.init.normal_(self.qkvr.weight, std=(2 / (inputs + width)) ** 0.5)

    def forward(self, x_BFD: Tensor) -> Tensor:
        size, features, _ = x_BFD.shape
        projected = self.qkvr(x_BFD.flatten(0, 1)).view(size, features, 4, self.heads, self.size)
        query, key, value, rest = projected.permute(2, 0, 3, 1, 4)
        sum_BHFD = self.attention(query, key, value, scale=1.0) + rest
        out: Tensor = self.activation(sum_BHFD.transpose(1, 2).flatten(2))
        return out
