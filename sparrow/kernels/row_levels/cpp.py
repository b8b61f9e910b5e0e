"""The compiled operator with the signature of the reference."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparrow.kernels import missing

assert not missing(), "`resolve` comes first"
ops = torch.ops.sparrow


def slots_of(
    rows_N: Tensor,
    bounds: Sequence[int],
    places_W2: Tensor,
    begins: Sequence[int],
    below: Sequence[int],
) -> Tensor:
    """See the package."""
    slots_N: Tensor = ops.row_levels_slots(rows_N.contiguous(), bounds, places_W2, begins, below)
    return slots_N
