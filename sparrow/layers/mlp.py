from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from sparrow.core.errors import require
from sparrow.layers.activation import Activation
from sparrow.layers.dropout import Dropout
from sparrow.layers.precision import to_compute
from sparrow.layers.product import Fold, Product


def require_sizes(**sizes: Sequence[int]) -> None:
    """Raise UserError for a layer size below 1."""
    for name, values in sizes.items():
        for value in values:
            require(least=1, **{name: value})


class Linear(nn.Module):
    """y = x W^T + b, [B, in] -> [B, out].

    Initialised as in DLRM: W ~ N(0, sqrt(2 / (in + out))), b ~ N(0, sqrt(1 / out)) (arXiv
    1906.00091, reference code).

    Args:
        in_features: columns of x.
        out_features: columns of y.
        bias: whether there is a b.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.randn(out_features, in_features) * math.sqrt(2 / (in_features + out_features))
        )
        self.bias = (
            nn.Parameter(torch.randn(out_features) * math.sqrt(1 / out_features)) if bias else None
        )
        self.product = Product()

    def forward(self, *parts: Tensor) -> Tensor:
        """Returns y [B, out]. parts: x [B, in], or several matrices that are x when they stand side
        by side.
        """
        out: Tensor = self.product(parts, self.weight, self.bias)
        return out


class Head(Linear):
    """The last layer of a model: logits, [B, in] -> [B, labels], in fp32 unless a recipe names it.

    In bf16 there would be only some hundred different logits. The bias begins at 0.

    Args:
        in_features: columns of the input.
        out_features: the number of labels.
        bias: whether there is one.
        scale: a factor on the first weights. After a norm, whose outputs have size 1, those of
            `Linear` would make random first predictions that a short run does not unlearn.
    """

    is_last = True  # see `put_layers`

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, scale: float = 1.0
    ) -> None:
        super().__init__(in_features, out_features, bias)
        self.product = Product(high=True)
        with torch.no_grad():
            self.weight.mul_(scale)
            if self.bias is not None:
                self.bias.zero_()

    def forward(self, *parts: Tensor) -> Tensor:
        """Returns logits [B, labels]. parts: as for `Linear`."""
        return super().forward(*(part.float() for part in parts))


class MLP(nn.Module):
    """Linear layers, each followed by an `Activation`: [B, in] -> [B, sizes[-1]], or [B, in] when
    there are no sizes.

    Args:
        in_features: columns of the input.
        sizes: columns of each layer's output.
        dropout: the share of each layer's output that is 0 in training; see `Dropout`. x then has a
            row for each sample of the batch.
    """

    def __init__(self, in_features: int, sizes: Sequence[int], dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = Dropout(dropout)
        self.layers = nn.ModuleList(
            Linear(i, o) for i, o in itertools.pairwise([in_features, *sizes])
        )
        if sizes:
            self.activation = Activation()
        self.out_features = sizes[-1] if sizes else in_features

    def forward(self, x: Tensor, fold: Fold | None = None) -> Tensor:
        """Returns the last layer's output. fold: fits the first layer's weight to x (see
        `NumericEmbedding.fold`).
        """
        for layer in self.layers:
            is_relu = self.activation.kind == "relu"  # which the product does too
            x = layer.product((x,), layer.weight, layer.bias, relu=is_relu, fold=fold)  # type: ignore[operator]
            x = x if is_relu else to_compute(self.activation(x))
            fold = None
            x = self.dropout(x)
        return x
