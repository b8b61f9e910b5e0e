"""The definition, in plain torch, for any device. The compiled operators add in another order."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from sparrow.kernels.dense import ALIGNED


def empty_like(x: Tensor) -> Tensor:
    """See the package."""
    return torch.empty_like(x)


def product(a: Tensor, b: Tensor, plus: Tensor | None) -> Tensor:
    """See the package."""
    return a @ b if plus is None else torch.addmm(plus, a, b)


def add_product_(out: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """See the package."""
    return out.addmm_(a, b)


def weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """See the package."""
    return grad.t() @ x


def cross(x0: Tensor, x: Tensor, product: Tensor, bias: Tensor) -> Tensor:
    """See the package."""
    return (_wide(x) + _wide(x0) * (_wide(product) + bias)).to(x0.dtype)


def cross_backward(
    grad: Tensor,
    x0: Tensor,
    product: Tensor,
    bias: Tensor,
    grad_x0: Tensor,
    first: bool,
    last: bool,
) -> tuple[Tensor, Tensor]:
    """See the package."""
    g = _wide(grad)
    to_x0 = g * (_wide(product) + bias)
    if not last:
        to_x0 = _wide(grad_x0) + to_x0
    grad_x0.copy_(to_x0 + g if first else to_x0)
    flowing = g * _wide(x0)
    return flowing.to(x0.dtype), flowing.sum(0)


def bias_relu_(y: Tensor, bias: Tensor) -> None:
    """See the package."""
    y.copy_((_wide(y) + bias).clamp_min(0))


def relu_backward(grad: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """See the package."""
    flowing = grad.masked_fill(y <= 0, 0)
    return flowing, _wide(flowing).sum(0)


def beside(
    numbers: Tensor, weight: Tensor, rest: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """See the package."""
    wide = torch.cat([(numbers[:, :, None] * weight).flatten(1), rest], 1)
    narrow = torch.cat([F.pad(numbers, (0, -numbers.shape[1] % ALIGNED)), rest], 1)
    return wide.to(dtype), narrow.to(dtype)


def beside_backward(
    grad_wide: Tensor, grad_narrow: Tensor, numbers: Tensor, dim: int
) -> tuple[Tensor, Tensor]:
    """See the package."""
    columns = numbers.shape[1]
    vectors, rest = _wide(grad_wide).tensor_split([columns * dim], 1)
    sums = (vectors.unflatten(1, (columns, dim)) * numbers[:, :, None]).sum(0)
    return sums.flatten(), rest + _wide(grad_narrow)[:, columns + -columns % ALIGNED :]


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
