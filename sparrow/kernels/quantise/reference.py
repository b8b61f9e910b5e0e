"""The definition: `sparrow.numerics`, with the random numbers of `numerics.rounding`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparrow import numerics
from sparrow.numerics.rounding import noise

if TYPE_CHECKING:
    from sparrow.kernels.quantise import Draw


def rounded(
    x: Tensor, format: numerics.Format, axis: int, how: numerics.Rounding, draw: Draw, dtype: torch.dtype
) -> Tensor:
    """See the package."""
    return numerics.rounded(x, format, axis, how, _noise(x, how, draw)).to(dtype)


def encode(x: Tensor, format: numerics.Format, axis: int, how: numerics.Rounding, draw: Draw) -> numerics.Packed:
    """See the package."""
    return numerics.encode(x, format, axis, how, _noise(x, how, draw))


def _noise(x: Tensor, how: numerics.Rounding, draw: Draw) -> Tensor | None:
    if how != "stochastic":
        return None
    rows_R = torch.arange(x.shape[:-1].numel(), device=x.device)
    return noise(draw.key, 0, rows_R, (0, x.shape[-1]), draw.number).view(x.shape)
