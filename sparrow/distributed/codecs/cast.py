from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from sparrow.distributed.codecs import Unit

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_TOP = 15  # fp16: the largest number of a block is scaled to below 2**_TOP
_MOST = 126  # so that 2**-_MOST is a normal number too
_HEAD = 2  # bytes of a block's exponent


@dataclass(frozen=True, kw_only=True)
class Config:
    """Rounds every number to the nearest of a format.

    dtype: "fp32" sends numbers as they are. "bf16" has 8 bits and the range of fp32. "fp16" has 11
    bits; it scales each message by a power of two, so that the largest finite number comes near
    that of fp16. Numbers down to 2**-29 of the largest keep 11 bits, and those below 2**-40 of it
    become 0.
    """

    dtype: Literal["fp32", "fp16", "bf16"] = "fp32"

    @property
    def unit(self) -> Unit:
        """See `Codec`."""
        return "message" if self.dtype == "fp16" else 1

    def encode(self, block_ND: Tensor, step: int, forward: bool) -> Tensor:
        """See `Codec`."""
        if self.dtype != "fp16":
            return _bytes(block_ND.to(_DTYPES[self.dtype]))
        if not block_ND.numel():
            return torch.empty(0, dtype=torch.uint8, device=block_ND.device)
        exponent = _exponent(block_ND)
        scaled_ND = (block_ND * torch.exp2(exponent.float())).to(torch.float16)
        return torch.cat([_bytes(exponent.to(torch.int16)[None]), _bytes(scaled_ND)])

    def decode(self, data: Tensor, rows: int, dim: int) -> Tensor:
        """See `Codec`."""
        if self.dtype != "fp16" or not rows * dim:
            return data.view(_DTYPES[self.dtype]).view(rows, dim).float()
        exponent = data[:_HEAD].view(torch.int16)
        return data[_HEAD:].view(torch.float16).view(rows, dim).float() * torch.exp2(
            -exponent.float()
        )

    def size(self, rows: int, dim: int) -> int:
        """See `Codec`."""
        head = _HEAD if self.dtype == "fp16" and rows * dim else 0
        return head + rows * dim * _DTYPES[self.dtype].itemsize

    def error(self, block_ND: Tensor) -> Tensor:
        """See `Codec`. It is half a unit in the last place; below the normal numbers that is
        constant. For bf16 it also covers what lies beyond its range.
        """
        if self.dtype == "fp32" or not block_ND.numel():
            return torch.zeros_like(block_ND)
        info = torch.finfo(_DTYPES[self.dtype])
        least = torch.tensor(info.smallest_normal * info.eps / 2)
        if self.dtype == "fp16":
            return block_ND.abs() * (info.eps / 2) + least * torch.exp2(
                -_exponent(block_ND).float()
            )
        return (
            block_ND.abs().clamp(max=info.max) * (info.eps / 2)
            + (block_ND.abs() - info.max).clamp(min=0)
            + least
        )


def _exponent(block_ND: Tensor) -> Tensor:
    """The exponent of the power of two that scales a block's largest finite number into [2**(_TOP -
    1), 2**_TOP).
    """
    largest = block_ND.nan_to_num(0, 0, 0).abs().amax()
    return (_TOP - torch.frexp(largest).exponent).clamp(max=_MOST)


def _bytes(numbers: Tensor) -> Tensor:
    numbers = numbers.contiguous()
    # a dimension of size 1 may have stride 0
    return numbers.as_strided((numbers.numel(),), (1,)).view(torch.uint8)
