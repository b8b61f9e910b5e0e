from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sparrow.kernels.formats import Field


@dataclass(frozen=True, kw_only=True)
class Config:
    """A row is float32, 4 bytes a column."""

    is_compiled = True

    def fields(self, dim: int) -> dict[str, Field]:
        """The only field is weight [D]."""
        return {"weight": Field(width=dim, dtype=torch.float32, across="cut")}

    def encode(self, values_UD: Tensor) -> dict[str, Tensor]:
        """See `RowFormat.encode`."""
        return {"weight": values_UD}

    def decode(self, fields: Mapping[str, Tensor]) -> Tensor:
        """See `RowFormat.decode`."""
        return fields["weight"]
