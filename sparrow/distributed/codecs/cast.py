from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Every number rounded to the nearest of a format.

    dtype: "fp32" as they are; "fp16" with 11 bits, where finite numbers beyond +-65504 are cut to it; "bf16" with 8
    bits and fp32's range.
    """

    dtype: Literal["fp32", "fp16", "bf16"] = "fp32"
    elementwise: ClassVar[bool] = True

    def encode(self, block_ND: Tensor, step: int, forward: bool) -> Tensor:
        """See `Codec`."""
        if self.dtype == "fp16":
            most = torch.finfo(torch.float16).max
            block_ND = torch.where(block_ND.isinf(), block_ND, block_ND.clamp(-most, most))
        cast_ND = block_ND.to(_DTYPES[self.dtype]).contiguous()
        return cast_ND.as_strided((cast_ND.numel(),), (1,)).view(torch.uint8)  # a side of 1 may keep a stride of 0

    def decode(self, data: Tensor, rows: int, dim: int) -> Tensor:
        """See `Codec`."""
        return data.view(_DTYPES[self.dtype]).view(rows, dim).float()

    def size(self, rows: int, dim: int) -> int:
        """See `Codec`."""
        return rows * dim * _DTYPES[self.dtype].itemsize

    def error(self, block_ND: Tensor) -> Tensor:
        """Half a unit in the last place, and what the range cuts off."""
        if self.dtype == "fp32":
            return torch.zeros_like(block_ND)
        info = torch.finfo(_DTYPES[self.dtype])
        least = info.smallest_normal * info.eps / 2  # below the normal numbers their distance is constant
        return block_ND.abs().clamp(max=info.max) * (info.eps / 2) + (block_ND.abs() - info.max).clamp(min=0) + least
