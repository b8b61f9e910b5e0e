from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sparrow.kernels.formats import Field, Rounding


@dataclass(frozen=True, kw_only=True)
class Config:
    """A row is float32, 4 bytes a column."""

    @property
    def rounding(self) -> Rounding:
        """Nothing is rounded."""
        return "nearest"

    def fields(self, dim: int) -> dict[str, Field]:
        """The only field is weight [D]."""
        return {"weight": Field(width=dim, dtype=torch.float32, across="cut")}

    def encode(self, values_UD: Tensor, noise_UD: Tensor | None) -> dict[str, Tensor]:
        """See `RowFormat.encode`."""
        return {"weight": values_UD}

    def decode(self, fields: Mapping[str, Tensor], dim: int) -> Tensor:
        """See `RowFormat.decode`."""
        return fields["weight"]

    exact = decode

    def cpp(self) -> str:
        """See `RowFormat.cpp`."""
        return "fp32"
