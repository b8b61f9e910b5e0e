"""What stands between two matrix products: a cross step, bias with ReLU, vectors of numbers;
forward and backward.

Matrices are [B, F] of one dtype, float32 or bfloat16, and biases are float32 [F]. Other types go to
the reference. Each operator computes in float32 and rounds once. impl: see `sparrow.kernels`. There
is no autograd here: `interactions/` and `layers/` add it.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from sparrow.kernels import Impl, Operator

_operator = Operator(__name__)

ALIGNED = 16  # columns: matrix products are fastest over whole vectors


def _implementation(impl: Impl, tensor: Tensor) -> ModuleType:
    compiled = tensor.dtype in (torch.float32, torch.bfloat16) or impl == "cpp"
    return _operator.choose(impl, tensor.device) if compiled else _operator.load("reference")


def empty_like(x: Tensor, *, impl: Impl = "auto") -> Tensor:
    """Returns an uninitialised matrix like x. If the kernels are compiled, the next step uses its
    memory again.
    """
    out: Tensor = _implementation(impl, x).empty_like(x)
    return out


def product(a: Tensor, b: Tensor, plus: Tensor | None = None, *, impl: Impl = "auto") -> Tensor:
    """Returns a @ b, plus a matrix of the same shape if one is given, in memory like that of
    `empty_like`.
    """
    out: Tensor = _implementation(impl, a).product(a, b, plus)
    return out


def add_product_(out: Tensor, a: Tensor, b: Tensor, *, impl: Impl = "auto") -> Tensor:
    """Returns `out`, to which a @ b was added in place."""
    result: Tensor = _implementation(impl, a).add_product_(out, a, b)
    return result


def weight_gradient(grad: Tensor, x: Tensor, *, impl: Impl = "auto") -> Tensor:
    """Returns the gradient of a weight, grad^T x [N, K]. grad: of the product with it, [B, N]. x:
    its input, [B, K].
    """
    out: Tensor = _implementation(impl, x).weight_gradient(grad, x)
    return out


def cross(x0: Tensor, x: Tensor, product: Tensor, bias: Tensor, *, impl: Impl = "auto") -> Tensor:
    """Returns x + x0 * (product + bias), [B, F] (arXiv 2008.13535, equation 1)."""
    out: Tensor = _implementation(impl, x0).cross(x0, x, product, bias)
    return out


def cross_backward(
    grad: Tensor,
    x0: Tensor,
    product: Tensor,
    bias: Tensor,
    grad_x0: Tensor,
    *,
    first: bool,
    last: bool,
    impl: Impl = "auto",
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of the product [B, F] and of the bias [F].

    Args:
        grad: the gradient of what `cross` returned, [B, F].
        x0, product, bias: as `cross` was given them.
        grad_x0: the gradient of x0 is added to it in place, [B, F].
        first: whether x is x0; then the gradient of x is added there too.
        last: whether grad_x0 is overwritten instead.
        impl: see `sparrow.kernels`.
    """
    grads: tuple[Tensor, Tensor] = _implementation(impl, x0).cross_backward(
        grad, x0, product, bias, grad_x0, first, last
    )
    return grads


def bias_relu_(y: Tensor, bias: Tensor, *, impl: Impl = "auto") -> None:
    """Make y max(y + bias, 0), in place."""
    _implementation(impl, y).bias_relu_(y, bias)


def relu_backward(grad: Tensor, y: Tensor, *, impl: Impl = "auto") -> tuple[Tensor, Tensor]:
    """Returns the gradients of what `bias_relu_` was given: of y [B, F] and of the bias [F]. y: its
    result.
    """
    grads: tuple[Tensor, Tensor] = _implementation(impl, y).relu_backward(grad, y)
    return grads


def beside(
    numbers: Tensor, weight: Tensor, rest: Tensor, dtype: torch.dtype, *, impl: Impl = "auto"
) -> tuple[Tensor, Tensor]:
    """Returns numbers beside further inputs in two forms, as matrices of `dtype`; see
    `NumericEmbedding`.

    The first has the scaled vector of each number, [B, C * D + R]. The second has the numbers,
    filled up with columns of 0 to a multiple P of ALIGNED, [B, P + R].

    Args:
        numbers: [B, C].
        weight: a vector for each column, [C, D].
        rest: further inputs, [B, R].
        dtype: float32 or bfloat16.
        impl: see `sparrow.kernels`.
    """
    matrices: tuple[Tensor, Tensor] = _implementation(impl, rest).beside(
        numbers, weight, rest, dtype
    )
    return matrices


def beside_backward(
    grad_wide: Tensor, grad_narrow: Tensor, numbers: Tensor, dim: int, *, impl: Impl = "auto"
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of the vectors [C * D] and of the further inputs [B, R], given those of
    both results.
    """
    grads: tuple[Tensor, Tensor] = _implementation(impl, grad_wide).beside_backward(
        grad_wide, grad_narrow, numbers, dim
    )
    return grads


__all__ = [
    "ALIGNED",
    "beside",
    "beside_backward",
    "bias_relu_",
    "cross",
    "cross_backward",
    "empty_like",
    "product",
    "relu_backward",
    "weight_gradient",
]
