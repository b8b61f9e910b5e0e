from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sparrow.kernels.formats import Field, Rounding
from sparrow.kernels.rounding import to_whole

META = 4  # bytes of scale and bias


@dataclass(frozen=True, kw_only=True)
class Config:
    """A row is four bits a column, the low half of a byte first, then scale and bias in float16: ceil(D/2) + 4 bytes.

    A value is code * scale + bias (arXiv 2010.11305). The table cannot be cut by columns. rounding: "stochastic", whose
    mean is the number itself: the bias is rounded down and the scale up, so that no value lies outside the codes. Or
    "nearest", whose rows are FBGEMM's fused 4-bit rows to the byte: scale and bias are rounded to nearest too, which
    cuts off an end of most rows.
    """

    rounding: Rounding = "stochastic"

    def fields(self, dim: int) -> dict[str, Field]:
        """The only field is weight [ceil(D / 2) + 4]."""
        return {"weight": Field(width=(dim + 1) // 2 + META, dtype=torch.uint8, across="whole")}

    def encode(self, values_UD: Tensor, noise_UD: Tensor | None) -> dict[str, Tensor]:
        """See `RowFormat.encode`."""
        low_U1, high_U1 = values_UD.amin(1, keepdim=True) + 0.0, values_UD.amax(1, keepdim=True) + 0.0  # no -0
        bias_U1 = low_U1.half() if noise_UD is None else _below(low_U1)
        range_U1 = high_U1 - bias_U1.float()
        scale_U1 = (torch.where(range_U1 == 0, 15.0, range_U1) / torch.full_like(range_U1, 15.0)).half()
        if noise_UD is None:
            scale_U1 = torch.where((scale_U1 == 0) | (1.0 / scale_U1.float()).isinf(), 1.0, scale_U1)
            codes_UD = ((values_UD - bias_U1.float()) * (1.0 / scale_U1.float())).round()
        else:
            for _ in range(2):  # rounding was to nearest: at most one step too low, and a second of the sum below
                cut = bias_U1.float() + 15.0 * scale_U1.float() < high_U1
                scale_U1 = torch.where(cut, _next(scale_U1), scale_U1)
            codes_UD = to_whole(((values_UD - bias_U1.float()) / scale_U1.float()).clamp(0.0, 15.0), noise_UD)
        codes_UD = codes_UD.nan_to_num(0.0).clamp(0, 15).to(torch.uint8)
        if codes_UD.shape[1] % 2:
            codes_UD = torch.cat([codes_UD, torch.zeros_like(codes_UD[:, :1])], 1)
        pairs = codes_UD[:, ::2] | codes_UD[:, 1::2] << 4
        return {"weight": torch.cat([pairs, torch.cat([scale_U1, bias_U1], 1).view(torch.uint8)], 1)}

    def decode(self, fields: Mapping[str, Tensor], dim: int) -> Tensor:
        """See `RowFormat.decode`."""
        pairs, meta = fields["weight"].split([(dim + 1) // 2, META], 1)
        scale_U1, bias_U1 = meta.clone(memory_format=torch.contiguous_format).view(torch.float16).float().split(1, 1)
        codes_UD = torch.stack([pairs & 15, pairs >> 4], 2).flatten(1)[:, :dim]
        return codes_UD.float() * scale_U1 + bias_U1

    exact = decode

    def cpp(self) -> str:
        """See `RowFormat.cpp`."""
        return "int4"


def _below(x: Tensor) -> Tensor:
    """Returns the largest float16 that is not above x."""
    near = x.half()
    lower = torch.where(near > 0, _bits(near) - 1, torch.where(near == 0, -0x7FFF, _bits(near) + 1))
    return torch.where(near.float() > x, lower.to(torch.int16).view(torch.float16), near)


def _next(x: Tensor) -> Tensor:
    """Returns the float16 after x >= 0."""
    return (_bits(x) + 1).to(torch.int16).view(torch.float16)


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int16).int()
