"""The definition."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def slots_of(
    rows_N: Tensor,
    bounds: Sequence[int],
    places_W2: Tensor,
    begins: Sequence[int],
    below: Sequence[int],
) -> Tensor:
    """See the package."""
    slots_N = rows_N.long().clone()
    numbers = torch.arange(64)
    for k, begin in enumerate(begins):
        if begin >= 0:
            part_N = slots_N[bounds[k] : bounds[k + 1]]
            bits_N, before_N = places_W2[begin + part_N // 64].unbind(1)
            is_set_N64 = (bits_N[:, None] >> numbers & 1).bool()
            at_N1 = part_N[:, None] % 64
            before_N = before_N + (is_set_N64 & (numbers < at_N1)).sum(1)
            part_N.copy_(
                torch.where(is_set_N64.gather(1, at_N1)[:, 0], below[k] + before_N, part_N)
            )
    return slots_N
