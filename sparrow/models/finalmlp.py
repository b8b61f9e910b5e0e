from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sparrow.core import Batch, UserError
from sparrow.core.errors import require
from sparrow.data.schema import Schema
from sparrow.kernels.rules import RowRule
from sparrow.layers import MLP, Linear, require_sizes
from sparrow.models._inputs import Vectors, tasks


@dataclass(frozen=True, kw_only=True)
class Config:
    """dim: of a feature's vector. first, second: sizes of the two MLPs. heads: of the bilinear fusion of both.

    gates: hidden sizes of the MLPs that weigh each MLP's inputs; none leaves the inputs as they are.
    """

    dim: int = 16
    first: tuple[int, ...] = (128, 64)
    second: tuple[int, ...] = (64,)
    heads: int = 2
    gates: tuple[int, ...] = (64,)

    def __post_init__(self) -> None:
        require_sizes(dim=(self.dim,), first=self.first, second=self.second, gates=self.gates)
        require(least=1, heads=self.heads)
        for name, sizes in (("first", self.first), ("second", self.second)):
            if not sizes:
                raise UserError(f"{name}: empty; give each of the two MLPs a size or more")
            if sizes[-1] % self.heads:
                raise UserError(f"heads: {self.heads} do not divide the last size of {name}; take a divisor")

    def build(self, schema: Schema, rule: RowRule, seed: int) -> nn.Module:
        """The model for a log."""
        return FinalMLP(schema, self, rule=rule, seed=seed)


class FinalMLP(nn.Module):
    """Two MLPs with inputs weighed apart, and a bilinear form of both (FinalMLP, arXiv 2304.00902).

    Each gate is made of one learned vector, the paper's choice where no features are named for it (section 3.2). It is
    the same for all examples: another path for the gradient, not another function.
    """

    def __init__(self, schema: Schema, config: Config, *, rule: RowRule, seed: int = 0) -> None:
        super().__init__()
        self.vectors = Vectors(schema, config.dim, rule, seed)
        features = self.vectors.features * config.dim
        self.gates = nn.ModuleList(_Gate(config.dim, features, config.gates) for _ in range(2 if config.gates else 0))
        self.streams = nn.ModuleList(MLP(features, sizes) for sizes in (config.first, config.second))
        self.fusion = _Fusion(config.first[-1], config.second[-1], config.heads, tasks(schema))

    def forward(self, batch: Batch) -> Tensor:
        """Logits [B, T]."""
        x = self.vectors(batch).flatten(1)
        inputs = [x * gate() for gate in self.gates] or [x, x]
        return self.fusion(*(stream(one) for stream, one in zip(self.streams, inputs, strict=True)))


class _Gate(nn.Module):
    """2 sigmoid(MLP(context)), between 0 and 2 for each input (equation 3)."""

    def __init__(self, dim: int, features: int, sizes: tuple[int, ...]) -> None:
        super().__init__()
        self.context = nn.Parameter(torch.randn(1, dim) / dim**0.5)
        self.hidden = MLP(dim, sizes)
        self.out = Linear(self.hidden.out_features, features)

    def forward(self) -> Tensor:
        return 2 * torch.sigmoid(self.out(self.hidden(self.context)).float())


class _Fusion(nn.Module):
    """b + w_1 o_1 + w_2 o_2 + sum over heads of o_1h W_h o_2h, for each task (equation 7)."""

    def __init__(self, first: int, second: int, heads: int, tasks: int) -> None:
        super().__init__()
        self.linear = Linear(first + second, tasks)
        scale = 1 / (first * second / heads) ** 0.5
        self.weight = nn.Parameter(torch.randn(heads, first // heads, tasks * (second // heads)) * scale)

    def forward(self, first_BX: Tensor, second_BY: Tensor) -> Tensor:
        heads = len(self.weight)
        left = torch.einsum("bhx,hxy->bhy", first_BX.unflatten(1, (heads, -1)), self.weight.to(first_BX.dtype))
        right_BH1Y = second_BY.unflatten(1, (heads, 1, -1))
        products = left.unflatten(2, (-1, right_BH1Y.shape[-1])) * right_BH1Y
        return self.linear(first_BX, second_BY) + products.float().sum((1, 3))
