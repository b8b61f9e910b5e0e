"""The definition: `sparrow.numerics`, with the random numbers of `numerics.rounding`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparrow import numerics
from sparrow.numerics.rounding import noise

if TYPE_CHECKING:
    from sparrow.kernels.quantise import Draw


BF16 = numerics.FORMATS["bf16"]  # a cast, which torch does in a tenth of the time


def rounded(
    x: Tensor, format: numerics.Format, axis: int, how: numerics.Rounding, draw: Draw, dtype: torch.dtype
) -> Tensor:
    """See the package."""
    if format == BF16 and how == "nearest":
        return x.to(torch.bfloat16).to(dtype)
    if format == BF16 and how == "zero":
        bits = x.float().view(torch.int32) & ~0xFFFF
        return torch.where(x.isnan(), torch.nan, bits.view(torch.float32)).to(dtype)
    return numerics.rounded(x, format, axis, how, _noise(x, how, draw)).to(dtype)


def encode(x: Tensor, format: numerics.Format, axis: int, how: numerics.Rounding, draw: Draw) -> numerics.Packed:
    """See the package."""
    return numerics.encode(x, format, axis, how, _noise(x, how, draw))


def decode(packed: numerics.Packed, format: numerics.Format, length: int) -> Tensor:
    """See the package."""
    return numerics.decode(packed, format, length)


def _noise(x: Tensor, how: numerics.Rounding, draw: Draw) -> Tensor | None:
    if how != "stochastic":
        return None
    rows_R = torch.arange(x.shape[:-1].numel(), device=x.device)
    return noise(draw.key, 0, rows_R, (0, x.shape[-1]), draw.number).view(x.shape)
