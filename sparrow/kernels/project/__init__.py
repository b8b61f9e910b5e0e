"""Parts of a matrix's columns, each times a matrix of its own, side by side or on top of each
other; both directions.

What makes a table's vectors of those of its components, for all tables in one call. impl: see
`sparrow.kernels`. There is no autograd here: `embeddings/` adds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from sparrow.kernels import Impl, Operator

_operator = Operator(__name__)


class Part(NamedTuple):
    """Columns [first, first + width) of x, which go to the columns from `to` on. weight: the number
    of W, or -1.
    """

    first: int
    width: int
    to: int
    weight: int = -1


def project(
    x_BE: Tensor,
    weights: Sequence[Tensor],
    parts: Sequence[Part],
    columns: int,
    *,
    impl: Impl = "auto",
) -> Tensor:
    """Returns float32 [B, columns]: for each part x_part W^T, or x_part itself, added where parts
    meet.

    Args:
        x_BE: float32 [B, E].
        weights: float32 W [D, d] each, d being the width of its part.
        parts: they reach all columns of the result.
        columns: of the result.
        impl: see `sparrow.kernels`.
    """
    out: Tensor = _operator.choose(impl, x_BE.device).project(x_BE, weights, parts, columns)
    return out


def project_backward(
    grad: Tensor,
    x_BE: Tensor,
    weights: Sequence[Tensor],
    parts: Sequence[Part],
    *,
    impl: Impl = "auto",
) -> tuple[Tensor, list[Tensor]]:
    """Returns the gradients of x [B, E] and of every weight. grad: of what `project` returned; the
    rest is as there.
    """
    implementation = _operator.choose(impl, x_BE.device)
    grads: tuple[Tensor, list[Tensor]] = implementation.project_backward(grad, x_BE, weights, parts)
    return grads


__all__ = ["Part", "project", "project_backward"]
