"""The definition: `sparrow.numerics`, with the random numbers of `numerics.rounding`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparrow.numerics import blocks
from sparrow.numerics.blocks import Packed
from sparrow.numerics.formats import FORMATS, Format
from sparrow.numerics.rounding import Rounding, noise

if TYPE_CHECKING:
    from sparrow.kernels.quantise import Draw


BF16 = FORMATS["bf16"]  # a cast, which torch does in a tenth of the time


def rounded(
    x: Tensor, format: Format, axis: int, how: Rounding, draw: Draw, dtype: torch.dtype
) -> Tensor:
    """See the package."""
    if format == BF16 and how == "nearest":
        return x.to(torch.bfloat16).to(dtype)
    if format == BF16 and how == "zero":
        bits = x.float().view(torch.int32) & ~0xFFFF
        return torch.where(x.isnan(), torch.nan, bits.view(torch.float32)).to(dtype)
    return blocks.rounded(x, format, axis, how, _noise(x, how, draw)).to(dtype)


def encode(x: Tensor, format: Format, axis: int, how: Rounding, draw: Draw) -> Packed:
    """See the package."""
    return blocks.encode(x, format, axis, how, _noise(x, how, draw))


def decode(packed: Packed, format: Format, length: int) -> Tensor:
    """See the package."""
    return blocks.decode(packed, format, length)


def decodes(format: Format) -> bool:
    """It decodes all formats."""
    return True


def covers(x: Tensor, format: Format, axis: int, how: Rounding, packed: bool) -> bool:
    """It rounds and packs all that the package takes."""
    return True


def _noise(x: Tensor, how: Rounding, draw: Draw) -> Tensor | None:
    if how != "stochastic":
        return None
    rows_R = torch.arange(x.shape[:-1].numel(), device=x.device)
    return noise(draw.key, 0, rows_R, (0, x.shape[-1]), draw.number).view(x.shape)
