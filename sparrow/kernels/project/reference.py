"""The definition, in plain torch, for any device. The compiled operators add in another order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from sparrow.kernels.project import Part


def project(x_BE: Tensor, weights: Sequence[Tensor], parts: Sequence[Part], columns: int) -> Tensor:
    """See the package."""
    out = x_BE.new_zeros(len(x_BE), columns)
    for part in parts:
        x_BD = x_BE[:, part.first : part.first + part.width]
        if part.weight >= 0:
            x_BD = x_BD @ weights[part.weight].t()
        out[:, part.to : part.to + x_BD.shape[1]] += x_BD
    return out


def project_backward(
    grad: Tensor, x_BE: Tensor, weights: Sequence[Tensor], parts: Sequence[Part]
) -> tuple[Tensor, list[Tensor]]:
    """See the package."""
    grad_x = torch.zeros_like(x_BE)
    grads = [torch.zeros_like(weight) for weight in weights]
    for part in parts:
        x_Bd = x_BE[:, part.first : part.first + part.width]
        width = part.width if part.weight < 0 else len(weights[part.weight])
        grad_BD = grad[:, part.to : part.to + width]
        if part.weight >= 0:
            grads[part.weight] += grad_BD.t() @ x_Bd
            grad_BD = grad_BD @ weights[part.weight]
        grad_x[:, part.first : part.first + part.width] += grad_BD
    return grad_x, grads
