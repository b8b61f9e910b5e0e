"""The three products of a layer with a weight, in memory that the next step uses again."""

from __future__ import annotations

import torch
from torch import Tensor

from sparrow.kernels import dense
from sparrow.layers.precisions import Way


def forward_product(x: Tensor, weight: Tensor, how: Way | None) -> tuple[Tensor, Tensor]:
    """Returns x W^T in the type of x, and what `input_gradient` takes as the weight.

    Args:
        x: [B, in].
        weight: W [out, in], in fp32 where `how` is given.
        how: it is computed; None takes the operands as they are.
    """
    if how is None:
        return dense.product(x, weight.t()), weight
    if (y := how.by_units(how.recipe.forward, x, weight.t())) is not None:
        return y.to(x.dtype), weight
    a, b = how.operands(how.recipe.forward, x, weight, (-1, -1), x.dtype)
    return dense.product(a, b.t()).to(x.dtype), b if how.rounds_weights_once else weight


def input_gradient(
    grad: Tensor, weight: Tensor, how: Way | None, plus: Tensor | None = None
) -> Tensor:
    """Returns dy W, plus a matrix of its shape if one is given, in the type of dy. The arguments
    are as there.
    """
    if how is None:
        return dense.product(grad, weight, plus)
    if (dx := how.by_units(how.recipe.input_gradient, grad, weight)) is not None:
        return (dx if plus is None else dx.add_(plus)).to(grad.dtype)
    a, b = how.operands(how.recipe.input_gradient, grad, weight, (-1, -2), grad.dtype)
    if a.dtype == grad.dtype:
        return dense.product(a, b, plus)
    dx = dense.product(a, b) if plus is None else dense.product(a, b, plus.to(a.dtype))
    return dx.to(grad.dtype)


def add_input_gradient_(out: Tensor, grad: Tensor, weight: Tensor, how: Way | None) -> Tensor:
    """Returns `out`, to which dy W was added in place. The arguments are as there."""
    if how is None:
        return dense.add_product_(out, grad, weight)
    if (dx := how.by_units(how.recipe.input_gradient, grad, weight)) is not None:
        return out.add_(dx)
    a, b = how.operands(how.recipe.input_gradient, grad, weight, (-1, -2), grad.dtype)
    return dense.add_product_(out, a, b) if a.dtype == out.dtype else out.add_(dense.product(a, b))


def weight_gradient(grad: Tensor, x: Tensor, how: Way | None, dtype: torch.dtype) -> Tensor:
    """Returns dy^T x, the gradient of a weight of type `dtype`. The arguments are as there."""
    if how is None:
        return dense.weight_gradient(grad, x)
    if (dw := how.by_units(how.recipe.weight_gradient, grad.t(), x)) is not None:
        return dw.to(dtype)
    a, b = how.operands(how.recipe.weight_gradient, grad, x, (-2, -2), grad.dtype)
    return dense.weight_gradient(a, b).to(grad.dtype).to(dtype)
