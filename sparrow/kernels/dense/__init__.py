"""What stands between two matrix products: a cross step, bias with ReLU, numbers' vectors; forward and backward.

Matrices are [B, F] of one dtype, float32 or bfloat16, biases float32 [F]; other types go to the reference. Each
operator computes in float32 and rounds once. impl: see `sparrow.kernels`. No autograd here: `interactions/` and
`layers/` supply it.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from sparrow.kernels import Impl, resolve
from sparrow.kernels.dense import reference
from sparrow.kernels.dense.reference import ALIGNED


def _implementation(impl: Impl, tensor: Tensor) -> ModuleType:
    compiled = tensor.dtype in (torch.float32, torch.bfloat16) or impl == "cpp"
    if not compiled or resolve(impl, tensor.device) == "reference":
        return reference
    from sparrow.kernels.dense import cpp  # can be imported only once the library is loaded

    return cpp


def empty_like(x: Tensor, *, impl: Impl = "auto") -> Tensor:
    """An uninitialised matrix; where it is compiled, in memory that the next step takes again."""
    out: Tensor = _implementation(impl, x).empty_like(x)
    return out


def product(a: Tensor, b: Tensor, plus: Tensor | None = None, *, impl: Impl = "auto") -> Tensor:
    """a @ b, plus a matrix of its shape; in memory like `empty_like`'s."""
    out: Tensor = _implementation(impl, a).product(a, b, plus)
    return out


def weight_gradient(grad: Tensor, x: Tensor, *, impl: Impl = "auto") -> Tensor:
    """grad^T x, [N, K] of [B, N] and [B, K]: what a product with a weight [N, K] gives back to it."""
    out: Tensor = _implementation(impl, x).weight_gradient(grad, x)
    return out


def cross(x0: Tensor, x: Tensor, product: Tensor, bias: Tensor, *, impl: Impl = "auto") -> Tensor:
    """x + x0 * (product + bias), [B, F] (arXiv 2008.13535, equation 1)."""
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
    """Gradients of the product [B, F] and of the bias [F], given that of `cross`'s result.

    Adds that of x0 to grad_x0, in place, or writes it there when `last`; with that of x where x is x0 (`first`).
    """
    found: tuple[Tensor, Tensor] = _implementation(impl, x0).cross_backward(
        grad, x0, product, bias, grad_x0, first, last
    )
    return found


def bias_relu_(y: Tensor, bias: Tensor, *, impl: Impl = "auto") -> None:
    """max(y + bias, 0), in place."""
    _implementation(impl, y).bias_relu_(y, bias)


def relu_backward(grad: Tensor, y: Tensor, *, impl: Impl = "auto") -> tuple[Tensor, Tensor]:
    """Gradients [B, F] of what `bias_relu_` was given, and of the bias [F], given its result y and that's gradient."""
    found: tuple[Tensor, Tensor] = _implementation(impl, y).relu_backward(grad, y)
    return found


def beside(
    numbers: Tensor, weight: Tensor, rest: Tensor, dtype: torch.dtype, *, impl: Impl = "auto"
) -> tuple[Tensor, Tensor]:
    """Of numbers [B, C], a vector for each column [C, D] and further inputs [B, R], as matrices of dtype: each number's
    scaled vector and the further inputs [B, C * D + R]; the numbers, with 0 up to a multiple of ALIGNED, and the same.
    """
    found: tuple[Tensor, Tensor] = _implementation(impl, rest).beside(numbers, weight, rest, dtype)
    return found


def beside_backward(
    grad_wide: Tensor, grad_narrow: Tensor, numbers: Tensor, dim: int, *, impl: Impl = "auto"
) -> tuple[Tensor, Tensor]:
    """Gradients of the vectors [C * D] and of the further inputs [B, R], given those of `beside`'s results."""
    found: tuple[Tensor, Tensor] = _implementation(impl, grad_wide).beside_backward(
        grad_wide, grad_narrow, numbers, dim
    )
    return found


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
