from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sparrow.kernels.formats import Field, Rounding


@dataclass(frozen=True, kw_only=True)
class Config:
    """A row is float32 in two halves; lookups read the high one, and the rule both (Kalamkar et
    al., SC 2020).

    The high half is fp32 truncated to bfloat16. It saves bandwidth of lookups and no memory in
    training.
    """

    @property
    def rounding(self) -> Rounding:
        """Nothing is rounded: the low half keeps what the high one lacks."""
        return "nearest"

    def fields(self, dim: int) -> dict[str, Field]:
        """The halves: weight [D] and low [D]."""
        low = Field(width=dim, dtype=torch.int16, across="cut")
        return {"weight": Field(width=dim, dtype=torch.bfloat16, across="cut"), "low": low}

    def encode(self, values_UD: Tensor, noise_UD: Tensor | None) -> dict[str, Tensor]:
        """See `RowFormat.encode`."""
        bits = values_UD.contiguous().view(torch.int32)
        return {
            "weight": (bits >> 16).to(torch.int16).view(torch.bfloat16),
            "low": bits.to(torch.int16),
        }

    def decode(self, fields: Mapping[str, Tensor], dim: int) -> Tensor:
        """See `RowFormat.decode`."""
        return fields["weight"].float()

    def exact(self, fields: Mapping[str, Tensor], dim: int) -> Tensor:
        """See `RowFormat.exact`."""
        high, low = fields["weight"].contiguous().view(torch.int16).int(), fields["low"].int()
        return (high << 16 | (low & 0xFFFF)).view(torch.float32)

    def cpp(self) -> str:
        """See `RowFormat.cpp`."""
        return "split_bf16"
