"""The compiled operators with the signatures of the reference, and what `torch.compile` must know about them."""

from __future__ import annotations

import torch
from torch import Tensor

from sparrow.kernels import missing
from sparrow.kernels.dense import reference

assert not missing(), "`resolve` comes first"
ops = torch.ops.sparrow
TILE = 16  # columns


def empty_like(x: Tensor) -> Tensor:
    """See the package."""
    if torch.compiler.is_compiling():
        return torch.empty_like(x)
    out: Tensor = ops.matrix(x.shape[0], x.shape[1], x.dtype == torch.bfloat16)
    return out


def product(a: Tensor, b: Tensor, plus: Tensor | None) -> Tensor:
    """See the package."""
    if torch.compiler.is_compiling():
        return reference.product(a, b, plus)
    out = ops.matrix(a.shape[0], b.shape[1], a.dtype == torch.bfloat16)
    return torch.mm(a, b, out=out) if plus is None else torch.addmm(plus, a, b, out=out)


def weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """See the package. It uses the tiles of AMX if it can, see amx.h."""
    is_thin = min(grad.shape[1], x.shape[1]) < TILE
    if x.dtype != torch.bfloat16 or is_thin or torch.compiler.is_compiling() or not ops.has_amx():
        return reference.weight_gradient(grad, x)
    out: Tensor = ops.weight_gradient(grad.contiguous(), x.contiguous())
    return out


def cross(x0: Tensor, x: Tensor, product: Tensor, bias: Tensor) -> Tensor:
    """See the package."""
    out: Tensor = ops.cross(x0.contiguous(), x.contiguous(), product, bias)
    return out


def cross_backward(
    grad: Tensor, x0: Tensor, product: Tensor, bias: Tensor, grad_x0: Tensor, first: bool, last: bool
) -> tuple[Tensor, Tensor]:
    """See the package."""
    found: tuple[Tensor, Tensor] = ops.cross_backward(
        grad.contiguous(), x0.contiguous(), product, bias, grad_x0, first, last
    )
    return found


def bias_relu_(y: Tensor, bias: Tensor) -> None:
    """See the package."""
    ops.bias_relu(y, bias)


def relu_backward(grad: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """See the package."""
    found: tuple[Tensor, Tensor] = ops.relu_backward(grad.contiguous(), y)
    return found


def beside(numbers: Tensor, weight: Tensor, rest: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """See the package."""
    found: tuple[Tensor, Tensor] = ops.beside(numbers.contiguous(), weight, rest.contiguous(), dtype == torch.bfloat16)
    return found


def beside_backward(grad_wide: Tensor, grad_narrow: Tensor, numbers: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """See the package."""
    found: tuple[Tensor, Tensor] = ops.beside_backward(
        grad_wide.contiguous(), grad_narrow.contiguous(), numbers.contiguous(), dim
    )
    return found


@torch.library.register_fake("sparrow::cross")
def _(x0, x, product, bias):  # type: ignore[no-untyped-def]
    return torch.empty_like(x0)


@torch.library.register_fake("sparrow::cross_backward")
def _(grad, x0, product, bias, grad_x0, first, last):  # type: ignore[no-untyped-def]
    return torch.empty_like(x0), torch.empty_like(bias)


@torch.library.register_fake("sparrow::bias_relu")
def _(y, bias):  # type: ignore[no-untyped-def]
    pass


@torch.library.register_fake("sparrow::relu_backward")
def _(grad, y):  # type: ignore[no-untyped-def]
    return torch.empty_like(y), y.new_empty(y.shape[1], dtype=torch.float32)


@torch.library.register_fake("sparrow::beside")
def _(numbers, weight, rest, narrow):  # type: ignore[no-untyped-def]
    return reference.beside(numbers, weight, rest, torch.bfloat16 if narrow else torch.float32)


@torch.library.register_fake("sparrow::beside_backward")
def _(grad_wide, grad_narrow, numbers, dim):  # type: ignore[no-untyped-def]
    return reference.beside_backward(grad_wide, grad_narrow, numbers, dim)
