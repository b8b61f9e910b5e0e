"""The compiled operators with the signatures of the reference, and what `torch.compile` must know
about them.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from sparrow.kernels import missing
from sparrow.kernels.dense import ALIGNED

assert not missing(), "`resolve` comes first"
ops = torch.ops.sparrow
TILE = 16  # columns
ONEDNN = 1 << 20  # multiply-adds from which oneDNN may win: its calls take 8 us longer


def empty_like(x: Tensor) -> Tensor:
    """See the package."""
    if torch.compiler.is_compiling():
        return torch.empty_like(x)
    out: Tensor = ops.matrix(x.shape[0], x.shape[1], x.dtype == torch.bfloat16)
    return out


def product(a: Tensor, b: Tensor, plus: Tensor | None) -> Tensor:
    """See the package."""
    if torch.compiler.is_compiling():
        return a @ b if plus is None else torch.addmm(plus, a, b)
    if _is_for_onednn(a, b):
        result = _in_onednn(a, b)
        return result if plus is None else result.add_(plus)
    out = ops.matrix(a.shape[0], b.shape[1], a.dtype == torch.bfloat16)
    return torch.mm(a, b, out=out) if plus is None else torch.addmm(plus, a, b, out=out)


def add_product_(out: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """See the package."""
    if torch.compiler.is_compiling() or not _is_for_onednn(a, b):
        return out.addmm_(a, b)
    return out.add_(_in_onednn(a, b))


@cache
def _has_slow_mm() -> bool:
    """Returns whether torch's `mm` is slower than oneDNN: it calls MKL, which takes 2.2 times as
    long on AMD's.
    """
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")[:4096]
    except OSError:
        return False
    return "AuthenticAMD" in text and torch.backends.mkldnn.is_available()


def _is_for_onednn(a: Tensor, b: Tensor) -> bool:
    size = a.shape[0] * a.shape[1] * b.shape[1]
    return size >= ONEDNN and a.dtype == b.dtype == torch.float32 and _has_slow_mm()


def _in_onednn(a: Tensor, b: Tensor) -> Tensor:
    """Returns a @ b."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(a, b.t(), None, "none", [], "")
    return out


def weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """See the package. It uses the tiles of AMX if it can, see amx.h."""
    if not torch.compiler.is_compiling() and _is_for_onednn(grad.t(), x):
        return _in_onednn(grad.t(), x)
    is_thin = min(grad.shape[1], x.shape[1]) < TILE
    if x.dtype != torch.bfloat16 or is_thin or torch.compiler.is_compiling() or not ops.has_amx():
        return grad.t() @ x
    out: Tensor = ops.weight_gradient(grad.contiguous(), x.contiguous())
    return out


def cross(x0: Tensor, x: Tensor, product: Tensor, bias: Tensor) -> Tensor:
    """See the package."""
    out: Tensor = ops.cross(x0.contiguous(), x.contiguous(), product, bias)
    return out


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
    grads: tuple[Tensor, Tensor] = ops.cross_backward(
        grad.contiguous(), x0.contiguous(), product, bias, grad_x0, first, last
    )
    return grads


def bias_relu_(y: Tensor, bias: Tensor) -> None:
    """See the package."""
    ops.bias_relu(y, bias)


def relu_backward(grad: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """See the package."""
    grads: tuple[Tensor, Tensor] = ops.relu_backward(grad.contiguous(), y)
    return grads


def beside(
    numbers: Tensor, weight: Tensor, rest: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """See the package."""
    matrices: tuple[Tensor, Tensor] = ops.beside(
        numbers.contiguous(), weight, rest.contiguous(), dtype == torch.bfloat16
    )
    return matrices


def beside_backward(
    grad_wide: Tensor, grad_narrow: Tensor, numbers: Tensor, dim: int
) -> tuple[Tensor, Tensor]:
    """See the package."""
    grads: tuple[Tensor, Tensor] = ops.beside_backward(
        grad_wide.contiguous(), grad_narrow.contiguous(), numbers.contiguous(), dim
    )
    return grads


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
    dtype = torch.bfloat16 if narrow else torch.float32
    (batch, columns), more = numbers.shape, rest.shape[1]
    padded = columns + -columns % ALIGNED
    widths = (columns * weight.shape[1] + more, padded + more)
    return tuple(rest.new_empty(batch, width, dtype=dtype) for width in widths)


@torch.library.register_fake("sparrow::beside_backward")
def _(grad_wide, grad_narrow, numbers, dim):  # type: ignore[no-untyped-def]
    columns = numbers.shape[1]
    sizes = (columns * dim,), (grad_wide.shape[0], grad_wide.shape[1] - columns * dim)
    return tuple(grad_wide.new_empty(size, dtype=torch.float32) for size in sizes)
