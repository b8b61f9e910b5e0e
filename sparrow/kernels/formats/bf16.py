from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sparrow.kernels.formats import Field, Rounding
from sparrow.numerics.rounding import to_bf16


@dataclass(frozen=True, kw_only=True)
class Config:
    """A row is bfloat16, 2 bytes a column: fp32 with 16 bits fewer (arXiv 1905.12322).

    rounding: "stochastic", whose mean is the number itself, or "nearest".
    """

    rounding: Rounding = "stochastic"

    def fields(self, dim: int) -> dict[str, Field]:
        """The only field is weight [D]."""
        return {"weight": Field(width=dim, dtype=torch.bfloat16, across="cut")}

    def encode(self, values_UD: Tensor, noise_UD: Tensor | None) -> dict[str, Tensor]:
        """See `RowFormat.encode`."""
        return {"weight": to_bf16(values_UD, noise_UD)}

    def decode(self, fields: Mapping[str, Tensor], dim: int) -> Tensor:
        """See `RowFormat.decode`."""
        return fields["weight"].float()

    exact = decode

    def cpp(self) -> str:
        """See `RowFormat.cpp`."""
        return "bf16"
