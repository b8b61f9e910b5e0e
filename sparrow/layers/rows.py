"""Some rows of a product, for those who watch it (`Watch`)."""

from __future__ import annotations

import torch
from torch import Tensor

SCATTER = 0x9E3779B9  # odd, so that remainders by a power of two take all values in turn


def sample_rows(x: Tensor, most: int) -> Tensor:
    """Returns so many rows of a matrix at most, or so many matrices, one of each of as many parts
    of equal lengths.

    Where rows are features of examples in turn, rows at equal distances could be of one feature
    alone.
    """
    step = max(1, len(x) // most)
    at = torch.arange(min(len(x), most), device=x.device)
    return x.detach()[at * step + at * SCATTER % step]
