"""Many roundings of the same numbers, and whether their mean is the numbers themselves."""

from __future__ import annotations

import torch
from torch import Tensor

from sparrow.kernels.formats import RowFormat
from sparrow.numerics.rounding import noise

KEY = 0xFEDCBA9876543210
BLOCK = 1 << 14  # updates that are made at a time


def stored(format: RowFormat, values_UD: Tensor, noise_UD: Tensor | None = None) -> Tensor:
    """Rows as lookups read them after they were written."""
    return format.decode(format.encode(values_UD, noise_UD), values_UD.shape[1])


def z_scores(format: RowFormat, x_D: Tensor, updates: int = 1 << 17, row: int = 3) -> Tensor:
    """How far the mean of a row over many updates is from x, in standard deviations of a mean, for
    each column.

    What the last bits of float32 make of an end of a row, code * scale + bias, is no deviation.
    """
    sums_2D, dim = torch.zeros(2, len(x_D), dtype=torch.float64), len(x_D)
    for first in range(0, updates, BLOCK):
        n_U = torch.arange(first, first + BLOCK)
        noise_UD = None
        if format.rounding == "stochastic":
            noise_UD = noise(KEY, 0, torch.full_like(n_U, row), (0, dim), n_U)
        error_UD = stored(format, x_D.expand(BLOCK, dim), noise_UD).double() - x_D.double()
        sums_2D += torch.stack([error_UD.sum(0), (error_UD**2).sum(0)])
    mean_D, square_D = sums_2D / updates
    deviation_D = ((square_D - mean_D**2).clamp(min=0) / updates).sqrt()
    last_bits = 2.0**-22 * x_D.abs().max().double() if format.cpp() in ("int8", "int4") else 0.0
    return torch.where(mean_D.abs() <= last_bits, 0.0, mean_D / deviation_D)
