from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sparrow.kernels.formats import Field


@dataclass(frozen=True, kw_only=True)
class Config:
    """A row is float16, rounded to nearest, 2 bytes a column. Numbers beyond 65,504 become infinite."""

    is_compiled = False

    def fields(self, dim: int) -> dict[str, Field]:
        """The only field is weight [D]."""
        return {"weight": Field(width=dim, dtype=torch.float16, across="cut")}

    def encode(self, values_UD: Tensor) -> dict[str, Tensor]:
        """See `RowFormat.encode`."""
        return {"weight": values_UD.half()}

    def decode(self, fields: Mapping[str, Tensor]) -> Tensor:
        """See `RowFormat.decode`."""
        return fields["weight"].float()
