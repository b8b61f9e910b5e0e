"""Products by a recipe: their operands are rounded to the formats that it names."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sparrow.layers.precisions import Pass, Way


class Rounded(torch.autograd.Function):
    """a b by a recipe: each operand of the three products is rounded from the original. Leading
    sizes are the same.
    """

    @staticmethod
    def forward(
        ctx: Any, a: Tensor, b: Tensor, how: Way, weight_first: bool, dtype: torch.dtype
    ) -> Tensor:
        """See `multiply`. weight_first: whether a is the weight. dtype: of the result."""
        ctx.save_for_backward(a, b)
        ctx.how = how
        ctx.weight_first = weight_first
        ctx.dtype = dtype
        formats = how.recipe.forward
        return multiply(a, b, formats[::-1] if weight_first else formats, how, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradients of both operands, in their types."""
        a, b = ctx.saved_tensors
        how = ctx.how
        dtype = ctx.dtype
        x_formats = how.recipe.input_gradient
        weight_formats = how.recipe.weight_gradient
        a_formats, b_formats = (
            (weight_formats, x_formats) if ctx.weight_first else (x_formats, weight_formats)
        )
        grad_a = grad_b = None
        if ctx.needs_input_grad[0]:
            grad_a = multiply(grad, b.mT, a_formats, how, dtype).to(a.dtype)
        if ctx.needs_input_grad[1]:
            grad_b = multiply(a.mT, grad, b_formats[::-1], how, dtype).to(b.dtype)
        return grad_a, grad_b, None, None, None


def multiply(
    a: Tensor, b: Tensor, formats: Pass | None, how: Way | None, dtype: torch.dtype | None = None
) -> Tensor:
    """Returns a b, [..., M, K] x [..., K, N] -> [..., M, N], in `dtype` or in the type of a.

    formats, how: in which the operands are; None takes them as they are.
    """
    if formats is None or how is None:
        return a @ b
    dtype = dtype or a.dtype
    if (product := how.by_units(formats, a, b)) is not None:
        return product.to(dtype)
    left, right = how.operands(formats, a, b, (-1, -2), dtype)
    return (left @ right).to(dtype)
