"""The compiled operator with the signature of the reference."""

from __future__ import annotations

import torch
from torch import Tensor

from sparrow.kernels import missing

assert not missing(), "`resolve` comes first"


def uniform_(
    out_RD: Tensor, key: int, scale: float, row: int, column: int, rows_R: Tensor | None
) -> None:
    """See the package."""
    signed = key - (1 << 64) if key >> 63 else key
    torch.ops.sparrow.philox_uniform(out_RD, signed, scale, row, column, rows_R)
