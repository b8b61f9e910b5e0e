"""Exponents and powers of two from the bits of fp32, and codes of a few bits packed into bytes.

The logarithm of a number just below a power of two may be rounded up to a whole number. Bits cannot
be wrong.
"""

from __future__ import annotations

import torch
from torch import Tensor


def exponents(x: Tensor) -> Tensor:
    """Returns floor(log2 |x|), int32; -127 for zeros and subnormal numbers, 128 for infinities and
    NaN. x: float32.
    """
    return (x.contiguous().view(torch.int32) >> 23 & 0xFF) - 127


def power(exponent: Tensor) -> Tensor:
    """Returns 2**exponent, float32. exponent: int32, -149 to 127; the powers below -126 are
    subnormal numbers.
    """
    subnormal = torch.ones_like(exponent) << (exponent + 149).clamp(0, 23)
    return torch.where(exponent < -126, subnormal, exponent + 127 << 23).view(torch.float32)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Returns the codes of each row one after the other, the low bits first, uint8 [..., ceil(N
    bits / 8)].

    codes: whole numbers from 0 to 2**bits - 1, [..., N].
    """
    if bits == 8:
        return codes.to(torch.uint8)
    kind = _holding(bits)
    stream = codes.to(kind).unsqueeze(-1) >> torch.arange(bits, dtype=kind, device=codes.device) & 1
    stream = torch.nn.functional.pad(
        stream.flatten(-2).to(torch.uint8), (0, -codes.shape[-1] * bits % 8)
    )
    weights = 1 << torch.arange(8, dtype=torch.uint8, device=codes.device)
    return (stream.unflatten(-1, (stream.shape[-1] // 8, 8)) * weights).sum(-1, dtype=torch.uint8)


def unpack(data: Tensor, bits: int, count: int) -> Tensor:
    """Returns the `count` codes of each row, int32 [..., count], that `pack` packed."""
    if bits == 8:
        return data[..., :count].int()
    stream = (
        data.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=data.device) & 1
    ).flatten(-2)
    weights = 1 << torch.arange(bits, dtype=_holding(bits), device=data.device)
    return (
        (stream[..., : count * bits].unflatten(-1, (count, bits)) * weights)
        .sum(-1, dtype=weights.dtype)
        .int()
    )


def _holding(bits: int) -> torch.dtype:
    """A type that holds codes of so many bits; bytes are far faster than words."""
    return torch.uint8 if bits < 8 else torch.int32
