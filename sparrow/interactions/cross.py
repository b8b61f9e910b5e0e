from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from sparrow.core.functions import applied
from sparrow.core.plain import plain
from sparrow.kernels import dense
from sparrow.layers.passes import (
    add_input_gradient_,
    forward_product,
    input_gradient,
    weight_gradient,
)
from sparrow.layers.precision import to_compute
from sparrow.layers.precisions import Way
from sparrow.layers.product import Fold, Product


class CrossNet(nn.Module):
    """DCNv2's cross layers: x_{l+1} = x_0 * (W_l x_l + b_l) + x_l, [B, features] -> [B, features].

    See arXiv 2008.13535, equations 1 and 2. The weights begin as Xavier-normal, the biases as zero.

    rank: factorises W = W2 V with V [rank, features] (MLPerf's DLRM-DCNv2). None keeps W whole.
    """

    def __init__(self, features: int, layers: int, rank: int | None = None) -> None:
        super().__init__()
        shapes = [(features, features)] if rank is None else [(rank, features), (features, rank)]
        self.weights = nn.ParameterList()
        for _ in range(layers):
            for shape in shapes:
                self.weights.append(nn.Parameter(nn.init.xavier_normal_(torch.empty(shape))))
        self.biases = nn.ParameterList(nn.Parameter(torch.zeros(features)) for _ in range(layers))
        self.products = nn.ModuleList(Product() for _ in self.weights)
        self.layers = layers

    def forward(self, x0: Tensor, narrow: Tensor | None = None, fold: Fold | None = None) -> Tensor:
        """Returns the last layer's output. narrow, fold: replace x0 in the first product (see
        `NumericEmbedding`).
        """
        x0 = to_compute(x0)
        x, fold = (x0, None) if narrow is None or fold is None else (to_compute(narrow), fold)
        biases = list(self.biases) or [self.weights[0].new_zeros(x0.shape[1])] * self.layers
        if torch.is_grad_enabled():
            first = self.weights[0] if fold is None else fold(self.weights[0])
            ways = [site.way for site in self.products]
            watches = [site.watch for site in self.products]
            out: Tensor = applied(
                _Cross, x0, x, ways, watches, first, *list(self.weights)[1:], *biases
            )
            return out
        factors = len(self.weights) // self.layers
        sites = zip(self.products, self.weights, strict=True)
        x0 = plain(x0)
        y = x0
        product = x
        for bias in biases:
            for site, weight in itertools.islice(sites, factors):
                product = site((product,), weight, fold=fold)
                fold = None
            y = product = dense.cross(x0, y, product, bias)
        return y


class _Cross(torch.autograd.Function):
    """All layers at once. What stands between their products takes one pass over [B, features] for
    each layer.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x0: Tensor,
        x: Tensor,
        ways: Sequence[Way | None],
        watches: Sequence[Any],
        *parameters: Tensor,
    ) -> Tensor:
        """ways, watches: see `Site.way` and `Site.watch`, of each product."""
        ctx.watches = watches
        count = len(ways)
        weights = list(parameters[:count])
        biases = parameters[count:]
        # as they are before they are rounded
        ctx.watched_weights = parameters[:count] if any(watches) else ()
        factors = count // len(biases)
        ctx.ways = ways
        ctx.dtypes = [weight.dtype for weight in weights]
        inputs = list[Tensor]()
        products = list[Tensor]()
        ctx.own = x is x0
        for layer, bias in enumerate(biases):
            product = x
            for i in range(layer * factors, (layer + 1) * factors):
                inputs.append(product)
                product, weights[i] = forward_product(product, weights[i], ways[i])
            products.append(product)
            x = dense.cross(x0, x if layer else x0, product, bias)
        ctx.save_for_backward(x0, *weights, *biases, *inputs, *products)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x0, *saved = ctx.saved_tensors
        ways = ctx.ways
        count = len(ctx.ways)
        layers = len(saved) // 2 - count
        factors = count // layers
        weights = saved[:count]
        biases = saved[count : count + layers]
        saved = saved[count + layers :]
        inputs = saved[:count]
        products = saved[count:]
        grad_x0 = dense.empty_like(x0)
        grad_x = None
        grad_weights = []
        grad_biases = []
        for layer in reversed(range(layers)):
            is_last = layer == layers - 1
            flowing, grad_bias = dense.cross_backward(
                grad, x0, products[layer], biases[layer], grad_x0, first=layer == 0, last=is_last
            )
            grad_biases.append(grad_bias)
            for i in reversed(range(layer * factors, (layer + 1) * factors)):
                if (watch := ctx.watches[i]) is not None:
                    watch.tell(inputs[i], ctx.watched_weights[i], flowing)
                grad_weights.append(weight_gradient(flowing, inputs[i], ways[i], ctx.dtypes[i]))
                if i > layer * factors:
                    flowing = input_gradient(flowing, weights[i], ways[i])
            weight = weights[layer * factors]
            way = ways[layer * factors]
            if layer and is_last:
                grad = input_gradient(flowing, weight, way, grad)
            elif layer:
                grad = add_input_gradient_(grad, flowing, weight, way)
            elif ctx.own:
                add_input_gradient_(grad_x0, flowing, weight, way)
            else:
                grad_x = input_gradient(flowing, weight, way)
        return (grad_x0, grad_x, None, None, *reversed(grad_weights), *reversed(grad_biases))
