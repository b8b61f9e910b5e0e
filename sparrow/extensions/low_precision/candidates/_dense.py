"""The products that training calls, so that a candidate is timed by what runs."""

from __future__ import annotations

from torch import Tensor

from sparrow.kernels import dense


def product(a: Tensor, b: Tensor) -> Tensor:
    """Returns a b as training computes it: see `layers.passes` for matrices,
    `layers.site.multiplied` for several.

    A gradient of a weight is dy^T x, so that a matrix that is stored by columns as a is dy^T.

    Args:
        a: [..., M, K], float32 or bfloat16.
        b: [..., K, N], of the same type.
    """
    if a.dim() > 2:
        return a @ b
    if not a.is_contiguous() and a.mT.is_contiguous():
        return dense.weight_gradient(a.mT, b)
    return dense.product(a, b)
