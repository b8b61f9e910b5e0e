"""The definition."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def slots_of(rows_N: Tensor, bounds: Sequence[int], above: Sequence[Tensor], below: Sequence[int]) -> Tensor:
    """See the package."""
    slots_N = rows_N.long().clone()
    for k, rows_U in enumerate(above):
        if len(rows_U):
            part_N = slots_N[bounds[k] : bounds[k + 1]]
            at_N = torch.searchsorted(rows_U, part_N).clamp_(max=len(rows_U) - 1)
            part_N.copy_(torch.where(rows_U[at_N] == part_N, at_N + below[k], part_N))
    return slots_N
