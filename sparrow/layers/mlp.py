from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparrow.core.errors import require


def require_sizes(**sizes: Sequence[int]) -> None:
    """UserError for a layer size below 1."""
    for name, values in sizes.items():
        for value in values:
            require(least=1, **{name: value})


class Linear(nn.Module):
    """y = x W^T + b, [..., in] -> [..., out].

    Initialised as in DLRM: W ~ N(0, sqrt(2 / (in + out))), b ~ N(0, sqrt(1 / out)) (arXiv 1906.00091, reference code).
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out_features, in_features) * math.sqrt(2 / (in_features + out_features)))
        self.bias = nn.Parameter(torch.randn(out_features) * math.sqrt(1 / out_features))

    def forward(self, x: Tensor) -> Tensor:
        """The product."""
        return F.linear(x, self.weight, self.bias)


class MLP(nn.Module):
    """Linear layers, each followed by a ReLU: [B, in] -> [B, sizes[-1]], or [B, in] when there are no sizes."""

    def __init__(self, in_features: int, sizes: Sequence[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Linear(i, o) for i, o in itertools.pairwise([in_features, *sizes]))
        self.out_features = sizes[-1] if sizes else in_features

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layers in order."""
        for layer in self.layers:
            x = F.relu(layer(x), inplace=True)
        return x
