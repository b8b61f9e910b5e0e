from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from sparrow.core.errors import require
from sparrow.core.functions import applied
from sparrow.kernels import dense
from sparrow.layers.precision import computing, to_compute

Fold = Callable[[Tensor], Tensor]
"""Makes of a weight one for narrower inputs, with the same product."""


def require_sizes(**sizes: Sequence[int]) -> None:
    """Raise UserError for a layer size below 1."""
    for name, values in sizes.items():
        for value in values:
            require(least=1, **{name: value})


class Linear(nn.Module):
    """y = x W^T + b, [B, in] -> [B, out].

    Initialised as in DLRM: W ~ N(0, sqrt(2 / (in + out))), b ~ N(0, sqrt(1 / out)) (arXiv 1906.00091, reference code).

    Args:
        in_features: columns of x.
        out_features: columns of y.
        bias: whether there is a b.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out_features, in_features) * math.sqrt(2 / (in_features + out_features)))
        self.bias = nn.Parameter(torch.randn(out_features) * math.sqrt(1 / out_features)) if bias else None

    def forward(self, *parts: Tensor) -> Tensor:
        """Returns y [B, out]. parts: x [B, in], or several matrices that are x when they stand side by side."""
        weights = self.weight.split([part.shape[1] for part in parts], 1)
        y: Tensor | None = self.bias
        for part, weight in zip(parts, weights, strict=True):
            x = to_compute(part)
            product: Tensor = applied(_Product, x, weight.to(x.dtype))
            y = product if y is None else y + product
        assert y is not None
        return y


class Head(Linear):
    """The last layer of a model: logits, [B, in] -> [B, labels], in fp32 in every precision of the run.

    In bf16 there would be only some hundred different logits. The bias begins at 0.

    Args:
        in_features: columns of the input.
        out_features: the number of labels.
        bias: whether there is one.
        scale: a factor on the first weights. After a norm, whose outputs have size 1, those of `Linear` would make
            random first predictions that a short run does not unlearn.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True, scale: float = 1.0) -> None:
        super().__init__(in_features, out_features, bias)
        with torch.no_grad():
            self.weight.mul_(scale)
            if self.bias is not None:
                self.bias.zero_()

    def forward(self, *parts: Tensor) -> Tensor:
        """Returns logits [B, labels]. parts: as for `Linear`."""
        with computing("fp32", self.weight.device):
            return super().forward(*(part.float() for part in parts))


class _Product(torch.autograd.Function):
    """x W^T. The gradient of x is in memory that the next step uses again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        return dense.product(grad, weight) if ctx.needs_input_grad[0] else None, dense.weight_gradient(grad, x)


class MLP(nn.Module):
    """Linear layers, each followed by a ReLU: [B, in] -> [B, sizes[-1]], or [B, in] when there are no sizes.

    Args:
        in_features: columns of the input.
        sizes: columns of each layer's output.
    """

    def __init__(self, in_features: int, sizes: Sequence[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Linear(i, o) for i, o in itertools.pairwise([in_features, *sizes]))
        self.out_features = sizes[-1] if sizes else in_features

    def forward(self, x: Tensor, fold: Fold | None = None) -> Tensor:
        """Returns the last layer's output. fold: fits the first layer's weight to x (see `NumericEmbedding.fold`)."""
        for layer in self.layers:
            weight: Any = layer.weight if fold is None else fold(layer.weight)  # type: ignore[arg-type]
            x, fold = applied(_ReluLinear, to_compute(x), to_compute(weight), layer.bias), None
        return x


class _ReluLinear(torch.autograd.Function):
    """max(x W^T + b, 0). The bias and the ReLU take one pass, and so do their gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        y = dense.product(x, weight.t())
        dense.bias_relu_(y, bias)
        ctx.save_for_backward(x, weight, y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, y = ctx.saved_tensors
        flowing, grad_bias = dense.relu_backward(grad, y)
        grad_x = dense.product(flowing, weight) if ctx.needs_input_grad[0] else None
        return grad_x, dense.weight_gradient(flowing, x), grad_bias
