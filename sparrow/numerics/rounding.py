"""Rounding to fewer bits: to nearest, or stochastically with numbers that anybody can compute
again.

Stochastic rounding (Gupta et al., arXiv 1502.02551) rounds up with a probability equal to the
distance from the number below, so that its expectation is the number itself. u depends on (seed,
table, field, row, column, n) alone, n being the number of the update: the same on every kernel,
thread and rank, and another one at the next update.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from sparrow.core.mixing import splitmix64

Rounding = Literal["nearest", "zero", "stochastic"]

LOW = (1 << 32) - 1
GOLDEN = 0x9E3779B9
# a mixer of 32 bits with low bias (Wellons, "hash prospector", 2018)
ODD_1 = 0x21F0AAAD
ODD_2 = 0x735A2D97


def noise(
    key: int, field: int, rows_U: Tensor, columns: tuple[int, int], n_U: Tensor | int
) -> Tensor:
    """Returns the random numbers for some entries, int64 [U, columns] of 32 bits.

    Args:
        key: of seed and table, 64 bits.
        field: which field of the row, 0 for its values.
        rows_U: int64 [U], counted in the whole component.
        columns: the first column and the one after the last, counted the same way.
        n_U: the number of the update, one for all rows or int64 [U].
    """
    n = torch.as_tensor(n_U, dtype=torch.int64, device=rows_U.device)
    signed = key - (1 << 64) if key >= 1 << 63 else key
    key_U = splitmix64(rows_U + splitmix64((n * 16 + field) ^ signed))[:, None]
    x_UC = torch.arange(*columns, device=rows_U.device) * GOLDEN + (key_U & LOW) & LOW
    x_UC = (x_UC ^ x_UC >> 16) * ODD_1 & LOW
    x_UC = x_UC ^ (key_U >> 32 & LOW)
    x_UC = (x_UC ^ x_UC >> 15) * ODD_2 & LOW
    return x_UC ^ x_UC >> 15


def to_whole(x: Tensor, noise: Tensor) -> Tensor:
    """Returns x rounded to a whole number stochastically, as float32. x: float32 >= 0. noise: see
    there.
    """
    below = x.floor()
    return below + (noise >> 1 < ((x - below) * 2.0**31).long()).float()


def to_fp16(x: Tensor, noise: Tensor | None) -> Tensor:
    """Returns float16. Stochastically, finite numbers stay finite; to nearest, those above 65,519
    become infinite.

    x: float32. noise: see there; None rounds to nearest.
    """
    if noise is None:
        return x.half()
    size = x.abs()
    size = torch.where(size.isinf(), size, size.clamp(max=65504.0))
    dropped = ((size.view(torch.int32) + (noise >> 19).int()) & ~0x1FFF).view(torch.float32)
    # a subnormal has fewer bits
    small = to_whole(torch.where(size < 2.0**-14, size, 0.0) * 2.0**24, noise) * 2.0**-24
    rounded = torch.where(size < 2.0**-14, small, torch.where(size.isfinite(), dropped, size))
    return rounded.copysign(x).half()


def to_bf16(x: Tensor, noise: Tensor | None) -> Tensor:
    """Returns bfloat16. Stochastically, finite numbers stay finite.

    x: float32. noise: see there; None rounds to nearest.
    """
    if noise is None:
        return x.bfloat16()
    size = x.abs()
    size = torch.where(size.isinf(), size, size.clamp(max=torch.finfo(torch.bfloat16).max))
    dropped = ((size.view(torch.int32) + (noise >> 16).int()) & ~0xFFFF).view(torch.float32)
    return torch.where(size.isfinite(), dropped, size).copysign(x).bfloat16()


def state_to_bf16(
    state: Tensor, key: int, field: int, rows_U: Tensor, columns: tuple[int, int], n: Tensor | int
) -> Tensor:
    """Returns what a rule keeps of some rows as bfloat16, rounded stochastically.

    Args:
        state: float32 [U], or [U, columns].
        key, field, rows_U, columns, n: of the random numbers, see `noise`. A single number of a row
            has column 0.
    """
    is_wide = state.dim() == 2
    random = noise(key, field, rows_U, columns if is_wide else (0, 1), n)
    return to_bf16(state, random if is_wide else random[:, 0])
