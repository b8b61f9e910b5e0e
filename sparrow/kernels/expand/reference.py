"""The definition of the sums, in plain torch; `README.md` has the mathematics."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 256  # values that are added one after the other


def sum_in_blocks(values_ND: Tensor, index_N: Tensor, count: int, block: int = BLOCK) -> Tensor:
    """See `sum_rows`. It adds each `block` values of a sum in their order, and then these sums in
    theirs.

    The blocks of a sum are added in parallel. The host waits for nothing: there are as many blocks
    as there can be at most, and those that are not needed are empty.
    """
    size, dim = values_ND.shape
    if not size or not count:
        return values_ND.new_zeros(count, dim)
    device = values_ND.device
    sorted_N, order_N = index_N.sort(stable=True)
    first_U1 = torch.searchsorted(sorted_N, torch.arange(count + 1, device=device))
    blocks_U = (first_U1.diff() + block - 1) // block
    block_U1 = torch.cat([blocks_U.new_zeros(1), blocks_U.cumsum(0)])
    block_K = torch.arange(size // block + min(count, size), device=device)
    # the sum that each block is part of
    sum_K = torch.searchsorted(block_U1[1:], block_K, right=True).clamp(max=count - 1)
    first_K = (first_U1[sum_K] + (block_K - block_U1[sum_K]) * block).clamp(max=size)
    first_K1 = torch.cat([first_K, first_U1[-1:]])
    parts_KD = torch.segment_reduce(
        values_ND[order_N], "sum", offsets=first_K1, axis=0, unsafe=True
    )
    return torch.segment_reduce(parts_KD, "sum", offsets=block_U1, axis=0, unsafe=True)
