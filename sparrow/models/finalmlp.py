from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from sparrow.core import Batch, UserError
from sparrow.core.errors import require, suggest
from sparrow.embeddings import TableChoices
from sparrow.features.schema import Schema
from sparrow.layers.mlp import MLP, Head, Linear, require_sizes
from sparrow.layers.site import Matmul
from sparrow.models._inputs import History, tasks
from sparrow.models._vectors import Vectors


@dataclass(frozen=True, kw_only=True)
class Config:
    """dim: the size of a feature's vector. first, second: sizes of the two MLPs. heads: of their
    bilinear fusion.

    gates: hidden sizes of the MLPs that weigh the inputs of each MLP; none leaves the inputs as
    they are. first_context, second_context: features that decide these weights, such as the user's
    for one and the item's for the other.
    dropout: of the two MLPs, see `MLP`. history: lists that transformers read.
    """

    dim: int = 16
    first: tuple[int, ...] = (128, 64)
    second: tuple[int, ...] = (64,)
    heads: int = 2
    gates: tuple[int, ...] = (64,)
    first_context: tuple[str, ...] = ()
    second_context: tuple[str, ...] = ()
    dropout: float = 0.0
    history: History = field(default_factory=History)

    def __post_init__(self) -> None:
        require_sizes(dim=(self.dim,), first=self.first, second=self.second, gates=self.gates)
        require(least=1, heads=self.heads)
        for name, sizes in (("first", self.first), ("second", self.second)):
            if not sizes:
                raise UserError(f"{name}: empty; give each of the two MLPs a size or more")
            if sizes[-1] % self.heads:
                raise UserError(
                    f"heads: {self.heads} do not divide {sizes[-1]}, {name}'s last size; take a"
                    " divisor"
                )

    def build(self, schema: Schema, tables: TableChoices) -> nn.Module:
        """Returns the model for a log."""
        return FinalMLP(schema, self, tables)


class FinalMLP(nn.Module):
    """Two MLPs, each with a gate on its inputs, and a bilinear form of both (FinalMLP, arXiv
    2304.00902).

    A gate for which no features are named depends on one learned vector (section 3.2). It is then
    the same for all examples. It changes how the model learns, not which functions there are.
    """

    def __init__(self, schema: Schema, config: Config, tables: TableChoices) -> None:
        super().__init__()
        self.vectors = Vectors(schema, config.dim, tables, config.history)
        features = self.vectors.features * config.dim
        self.contexts = [
            self._places(name, getattr(config, name))
            for name in ("first_context", "second_context")
        ]
        if any(self.contexts) and not config.gates:
            raise UserError(
                "model.first_context, model.second_context: nothing reads them without gates"
            )
        self.gates = nn.ModuleList(
            _Gate(config.dim, len(places), features, config.gates)
            for places in self.contexts
            if config.gates
        )
        self.streams = nn.ModuleList(
            MLP(features, sizes, config.dropout) for sizes in (config.first, config.second)
        )
        self.fusion = _Fusion(config.first[-1], config.second[-1], config.heads, tasks(schema))

    def forward(self, batch: Batch) -> Tensor:
        """Returns logits [B, T]."""
        vectors_BFD = self.vectors(batch)
        x = vectors_BFD.flatten(1)
        vectors = vectors_BFD.unbind(1)
        inputs = []
        # without gates there are no contexts
        for gate, places in zip(self.gates, self.contexts, strict=False):
            context = torch.cat([x[:, :0], *(vectors[place] for place in places)], 1)
            inputs.append(x * gate(context).to(x.dtype))
        inputs = inputs or [x, x]
        streams = zip(self.streams, inputs, strict=True)
        return self.fusion(*(stream(input_BX) for stream, input_BX in streams))

    def _places(self, setting: str, names: tuple[str, ...]) -> list[int]:
        """Returns the positions of features among the vectors."""
        features = self.vectors.names
        places: list[int] = []
        for name in names:
            if name not in features:
                raise UserError(f"model.{setting}: no feature {name!r}{suggest(name, features)}")
            places += [place for place, feature in enumerate(features) if feature == name]
        return places


class _Gate(nn.Module):
    """2 sigmoid(MLP(context)), between 0 and 2 for each input (equation 3). named: features of the
    context.
    """

    def __init__(self, dim: int, named: int, inputs: int, sizes: tuple[int, ...]) -> None:
        super().__init__()
        self.context = None if named else nn.Parameter(torch.randn(1, dim) / dim**0.5)
        self.hidden = MLP(dim * max(named, 1), sizes)
        self.out = Linear(self.hidden.out_features, inputs)

    def forward(self, named_BX: Tensor) -> Tensor:
        context = named_BX if self.context is None else self.context
        return 2 * torch.sigmoid(self.out(self.hidden(context)).float())


class _Fusion(nn.Module):
    """b + w_1 o_1 + w_2 o_2 + sum over heads of o_1h W_h o_2h, for each task (equation 7)."""

    def __init__(self, first: int, second: int, heads: int, tasks: int) -> None:
        super().__init__()
        self.linear = Head(first + second, tasks)
        scale = 1 / (first * second / heads) ** 0.5
        self.weight = nn.Parameter(
            torch.randn(heads, first // heads, tasks * (second // heads)) * scale
        )
        self.product = Matmul()

    def forward(self, first_BX: Tensor, second_BY: Tensor) -> Tensor:
        heads = len(self.weight)
        first_HBX = first_BX.unflatten(1, (heads, -1)).transpose(0, 1)
        left = self.product(first_HBX, self.weight, weights=True).transpose(0, 1)
        right_BH1Y = second_BY.unflatten(1, (heads, 1, -1)).float()
        products = left.float().unflatten(2, (-1, right_BH1Y.shape[-1])) * right_BH1Y
        return self.linear(first_BX, second_BY) + products.sum((1, 3))
