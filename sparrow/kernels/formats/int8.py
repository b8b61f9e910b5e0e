from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sparrow.kernels.formats import Field, Rounding
from sparrow.numerics.rounding import to_whole

META = 8  # bytes of scale and bias


@dataclass(frozen=True, kw_only=True)
class Config:
    """A row is a byte a column, then scale and bias in float32: D + 8 bytes (arXiv 2010.11305).

    A value is code * scale + bias. The table cannot be cut by columns. rounding: "stochastic",
    whose mean is the number itself, or "nearest", whose rows are FBGEMM's fused 8-bit rows to the
    byte.
    """

    rounding: Rounding = "stochastic"

    def fields(self, dim: int) -> dict[str, Field]:
        """The only field is weight [D + 8]."""
        return {"weight": Field(width=dim + META, dtype=torch.uint8, across="whole")}

    def encode(self, values_UD: Tensor, noise_UD: Tensor | None) -> dict[str, Tensor]:
        """See `RowFormat.encode`."""
        # adding 0 makes 0 of -0
        low_U1 = values_UD.amin(1, keepdim=True) + 0.0
        high_U1 = values_UD.amax(1, keepdim=True) + 0.0
        range_U1 = high_U1 - low_U1
        # by a number torch may take its reciprocal
        scale_U1 = range_U1 / torch.full_like(range_U1, 255.0)
        if noise_UD is None:
            factor_U1 = torch.full_like(range_U1, 255.0) / (range_U1 + 1e-8)
            codes_UD = ((values_UD - low_U1) * factor_U1).round()
        else:
            steps_UD = (values_UD - low_U1) / torch.where(scale_U1 > 0, scale_U1, 1.0)
            codes_UD = to_whole(steps_UD.clamp(max=255.0), noise_UD)
        meta = torch.cat([scale_U1, low_U1], 1).view(torch.uint8)
        return {"weight": torch.cat([codes_UD.clamp(0, 255).to(torch.uint8), meta], 1)}

    def decode(self, fields: Mapping[str, Tensor], dim: int) -> Tensor:
        """See `RowFormat.decode`."""
        codes_UD, meta = fields["weight"].split([dim, META], 1)
        scale_U1, bias_U1 = (
            meta.clone(memory_format=torch.contiguous_format).view(torch.float32).split(1, 1)
        )
        return codes_UD.float() * scale_U1 + bias_U1

    exact = decode

    def cpp(self) -> str:
        """See `RowFormat.cpp`."""
        return "int8"
