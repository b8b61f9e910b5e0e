from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor, nn

from sparrow.core import Batch, UserError
from sparrow.core.errors import require, suggest
from sparrow.embeddings import TableChoices
from sparrow.features.schema import Schema
from sparrow.layers.mlp import MLP, Head, Linear, require_sizes
from sparrow.layers.norm import LayerNorm
from sparrow.layers.precision import to_compute
from sparrow.layers.product import Product
from sparrow.layers.site import Matmul
from sparrow.models._inputs import History, Ids, tasks


@dataclass(frozen=True, kw_only=True)
class Config:
    """dim: the size of a vector. bottom: hidden sizes of the MLP of the dense columns. layers: how
    many. n_f, n_l: how many vectors the FM block and the linear block of a layer return. k: the
    rank of the low-rank product. mlp, top: hidden sizes of FM blocks and of the head.

    several: table -> vectors of each of its ids, for important features. projection: the Y of the
    low-rank product is learned ("linear"), or is an MLP's output for each example ("attentive"),
    from `compressed` vectors. dropout: of the MLPs of FM blocks and of the head, see `MLP`.
    history: lists that transformers read.
    """

    dim: int = 16
    bottom: tuple[int, ...] = (64,)
    layers: int = 2
    n_f: int = 8
    n_l: int = 8
    k: int = 8
    mlp: tuple[int, ...] = (128,)
    top: tuple[int, ...] = (64,)
    several: dict[str, int] = field(default_factory=dict)
    projection: Literal["attentive", "linear"] = "attentive"
    compressed: int = 4
    dropout: float = 0.0
    history: History = field(default_factory=History)

    def __post_init__(self) -> None:
        require_sizes(dim=(self.dim,), bottom=self.bottom, mlp=self.mlp, top=self.top)
        require(
            least=1,
            layers=self.layers,
            n_f=self.n_f,
            n_l=self.n_l,
            k=self.k,
            compressed=self.compressed,
        )
        for name, count in self.several.items():
            require(least=1, **{f"several.{name}": count})

    def build(self, schema: Schema, tables: TableChoices) -> nn.Module:
        """Returns the model for a log."""
        return Wukong(schema, self, tables)

    def larger(self) -> Config:
        """Returns the next size: layers first, up to four, then n_f, n_l, k and the MLPs together
        (section 5.2).
        """
        if self.layers < 4:
            return replace(self, layers=self.layers + 1)
        wide = tuple(2 * size for size in self.mlp)
        return replace(
            self,
            n_f=2 * self.n_f,
            n_l=2 * self.n_l,
            k=2 * self.k,
            mlp=wide,
            compressed=2 * self.compressed,
        )


class Wukong(nn.Module):
    """Stacked factorization machines: layer i reaches order 2^i and more (Wukong, arXiv
    2403.02545).
    """

    def __init__(self, schema: Schema, config: Config, tables: TableChoices) -> None:
        super().__init__()
        for name in config.several:
            if name not in schema.encodings:
                raise UserError(
                    f"model.several: no table {name!r}{suggest(name, schema.encodings)}"
                )
        self.dim = config.dim
        self.ids = Ids(schema, config.dim, tables, config.history, several=config.several)
        self.bottom = (
            MLP(len(schema.numbers), [*config.bottom, config.dim]) if schema.dense else None
        )
        sizes = [self.ids.vectors + bool(schema.dense), *[config.n_f + config.n_l] * config.layers]
        self.layers = nn.ModuleList(_Layer(size, config) for size in sizes[:-1])
        self.top = MLP(sizes[-1] * config.dim, config.top, config.dropout)
        self.head = Head(self.top.out_features, tasks(schema), scale=0.1)

    def forward(self, batch: Batch) -> Tensor:
        """Returns logits [B, T]."""
        parts = [] if self.bottom is None else [self.bottom(batch.dense_BC)]
        x_BE = torch.cat([to_compute(part) for part in (*parts, self.ids(batch))], 1)
        x_NBD = x_BE.unflatten(1, (-1, self.dim)).transpose(0, 1).contiguous()
        for layer in self.layers:
            x_NBD = layer(x_NBD)
        return self.head(self.top(x_NBD.transpose(0, 1).flatten(1)))


class _Layer(nn.Module):
    """norm(FM block and linear block side by side + residual), the norm over each vector (section
    3.2).
    """

    def __init__(self, n: int, config: Config) -> None:
        super().__init__()
        wide = config.n_f + config.n_l
        self.fm = _FactorizationBlock(n, config)
        # what is linear in the vectors is one product: the linear block, what the FM block
        # projects, the residual
        self.across = _Across(n, [config.n_l, self.fm.projected, wide if n != wide else 0])
        self.norm = LayerNorm(config.dim)

    def forward(self, x_NBD: Tensor) -> Tensor:
        linear, projected, residual = self.across(x_NBD)
        blocks_NBD = torch.cat([self.fm(x_NBD, projected), linear])
        return self.norm(blocks_NBD + (residual if len(residual) else x_NBD))


class _Across(nn.Module):
    """W X for several W: vectors that are sums of vectors, [n, B, D] -> [m, B, D] for each m of
    `sizes`.
    """

    def __init__(self, n: int, sizes: list[int]) -> None:
        super().__init__()
        self.sizes = sizes
        self.weight = nn.Parameter(torch.randn(sum(sizes), n) / n**0.5)
        self.product = Product()

    def forward(self, x_NBD: Tensor) -> tuple[Tensor, ...]:
        y_MBD: Tensor = self.product((x_NBD,), self.weight, across=True)
        return y_MBD.split(self.sizes)


class _FactorizationBlock(nn.Module):
    """MLP(norm(X X^T Y)) as n_f vectors, X^T Y first: O(n k D), not O(n^2 D) (section 3.3 and
    3.6).
    """

    def __init__(self, n: int, config: Config) -> None:
        super().__init__()
        self.k = config.k
        self.dim = config.dim
        self.is_linear = config.projection == "linear"
        self.projected = config.k if self.is_linear else config.compressed
        if not self.is_linear:
            hidden = config.compressed * config.dim
            self.attention = MLP(hidden, [hidden])
            self.project = Linear(hidden, n * config.k)
            self.inner = Matmul()  # X^T Y
        self.outer = Matmul()  # X (X^T Y)
        self.norm = LayerNorm(n * config.k)
        self.mlp = MLP(n * config.k, config.mlp, config.dropout)
        self.out = Linear(self.mlp.out_features, config.n_f * config.dim)

    def forward(self, x_NBD: Tensor, projected: Tensor) -> Tensor:
        """projected: X^T Y of a linear Y [k, B, D], or the vectors that Y is made of."""
        x_BND = x_NBD.transpose(0, 1)
        if self.is_linear:
            product_BDK = projected.permute(1, 2, 0)
        else:
            y = self.project(self.attention(projected.transpose(0, 1).flatten(1))).unflatten(
                1, (-1, self.k)
            )
            product_BDK = self.inner(x_BND.transpose(1, 2), y.to(x_NBD.dtype) / len(x_NBD) ** 0.5)
        out = self.out(self.mlp(self.norm(self.outer(x_BND, product_BDK).flatten(1))))
        return out.unflatten(1, (-1, self.dim)).transpose(0, 1)
