"""The compiled operators with the signatures of the reference."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparrow.kernels import missing

if TYPE_CHECKING:
    from sparrow.kernels.project import Part

assert not missing(), "`resolve` comes first"
ops = torch.ops.sparrow


def project(x_BE: Tensor, weights: Sequence[Tensor], parts: Sequence[Part], columns: int) -> Tensor:
    """See the package."""
    out: Tensor = ops.project(x_BE.contiguous(), _contiguous(weights), _numbers(parts), columns)
    return out


def project_backward(
    grad: Tensor, x_BE: Tensor, weights: Sequence[Tensor], parts: Sequence[Part]
) -> tuple[Tensor, list[Tensor]]:
    """See the package."""
    grad_x, *grads = ops.project_backward(
        grad.contiguous(), x_BE.contiguous(), _contiguous(weights), _numbers(parts)
    )
    return grad_x, grads


def _contiguous(weights: Sequence[Tensor]) -> list[Tensor]:
    return [weight.contiguous() for weight in weights]


def _numbers(parts: Sequence[Part]) -> list[int]:
    return list(chain.from_iterable(parts))


# -- for torch.compile -----------------------------------------------------------------------------


@torch.library.register_fake("sparrow::project")
def _(x, weights, parts, columns):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape[0], columns)


@torch.library.register_fake("sparrow::project_backward")
def _(grad, x, weights, parts):  # type: ignore[no-untyped-def]
    return [torch.empty_like(x), *(torch.empty_like(weight) for weight in weights)]
