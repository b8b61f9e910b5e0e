from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class CrossNet(nn.Module):
    """DCNv2's cross layers: x_{l+1} = x_0 * (W_l x_l + b_l) + x_l, [B, features] -> [B, features].

    rank: factorise W = W2 V with V [rank, features] (MLPerf's DLRM-DCNv2); None keeps W whole. Xavier-normal
    weights, zero biases (arXiv 2008.13535, equations 1 and 2).
    """

    def __init__(self, features: int, layers: int, rank: int | None = None) -> None:
        super().__init__()
        shapes = [(features, features)] if rank is None else [(rank, features), (features, rank)]
        self.weights = nn.ParameterList()
        for _ in range(layers):
            for shape in shapes:
                self.weights.append(nn.Parameter(nn.init.xavier_normal_(torch.empty(shape))))
        self.biases = nn.ParameterList(nn.Parameter(torch.zeros(features)) for _ in range(layers))
        self.factors = len(shapes)

    def forward(self, x0: Tensor) -> Tensor:
        """Apply the layers in order."""
        x = x0
        for layer, bias in enumerate(self.biases):
            product = x
            for weight in self.weights[layer * self.factors : (layer + 1) * self.factors]:
                product = F.linear(product, weight)
            x = torch.addcmul(x, x0, product + bias)
        return x
