from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sparrow.kernels.formats import Field, Rounding
from sparrow.numerics.rounding import to_fp16


@dataclass(frozen=True, kw_only=True)
class Config:
    """A row is float16, 2 bytes a column.

    rounding: "stochastic", whose mean is the number itself, or "nearest". Numbers above 65,504
    become 65,504, or infinite to nearest.
    """

    rounding: Rounding = "stochastic"

    def fields(self, dim: int) -> dict[str, Field]:
        """The only field is weight [D]."""
        return {"weight": Field(width=dim, dtype=torch.float16, across="cut")}

    def encode(self, values_UD: Tensor, noise_UD: Tensor | None) -> dict[str, Tensor]:
        """See `RowFormat.encode`."""
        return {"weight": to_fp16(values_UD, noise_UD)}

    def decode(self, fields: Mapping[str, Tensor], dim: int) -> Tensor:
        """See `RowFormat.decode`."""
        return fields["weight"].float()

    exact = decode

    def cpp(self) -> str:
        """See `RowFormat.cpp`."""
        return "fp16"
