from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from sparrow.layers import to_compute


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

    def forward(self, x0: Tensor) -> Tensor:
        """Apply the layers in order."""
        x0 = to_compute(x0)
        parameters = [p.to(x0.dtype) for p in (*self.weights, *self.biases)]
        out: Tensor = _Cross.apply(x0, len(self.biases), *parameters)
        return out


class _Cross(torch.autograd.Function):
    """All layers at once: their backward shares its buffers, which saves a third of the passes over [B, features]."""

    @staticmethod
    def forward(ctx: Any, x0: Tensor, layers: int, *parameters: Tensor) -> Tensor:
        weights, biases = parameters[:-layers], parameters[-layers:]
        factors = len(weights) // layers
        x, inputs, products = x0, [], []
        for layer, bias in enumerate(biases):
            product = x
            for f, weight in enumerate(weights[layer * factors : (layer + 1) * factors]):
                inputs.append(product)
                product = F.linear(product, weight, bias if f == factors - 1 else None)
            products.append(product)
            x = torch.addcmul(x, x0, product)
        ctx.layers, ctx.factors = layers, factors
        ctx.save_for_backward(x0, *weights, *inputs, *products)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        layers, factors = ctx.layers, ctx.factors
        x0, *saved = ctx.saved_tensors
        count = layers * factors
        weights, inputs, products = saved[:count], saved[count : 2 * count], saved[2 * count :]
        grad_x0 = grad * products[-1]
        grad, grad_weights, grad_biases = grad.clone(), [], []  # ours to change
        for layer in reversed(range(layers)):
            if layer < layers - 1:
                grad_x0.addcmul_(grad, products[layer])
            flowing = grad * x0
            grad_biases.append(flowing.sum(0))
            for i in reversed(range(layer * factors, (layer + 1) * factors)):
                grad_weights.append(flowing.t() @ inputs[i])
                flowing = flowing @ weights[i] if i > layer * factors else grad.addmm_(flowing, weights[i])
        return (grad_x0.add_(grad), None, *reversed(grad_weights), *reversed(grad_biases))
