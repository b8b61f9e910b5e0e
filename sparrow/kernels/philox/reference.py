"""The definition, in plain torch, for any device; `README.md` has the mathematics."""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDS, LANES = 10, 4
MULTIPLIERS, WEYL = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)
LOW = (1 << 32) - 1
BLOCK = 1 << 18  # numbers that are made at a time; the words of each take 8 bytes, several times


def philox(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns four words for each counter of four words, each int64 in [0, 2**32). key: 64 bits."""
    a, b, c, d = counter
    low, high = key & LOW, key >> 32 & LOW
    for _ in range(ROUNDS):
        # 64 bits, as a signed number
        product_a = a * MULTIPLIERS[0]
        product_c = c * MULTIPLIERS[1]
        a = _high(product_c) ^ b ^ low
        b = product_c & LOW
        c = _high(product_a) ^ d ^ high
        d = product_a & LOW
        low, high = (low + WEYL[0]) & LOW, (high + WEYL[1]) & LOW
    return a, b, c, d


def uniform_(
    out_RD: Tensor, key: int, scale: float, row: int, column: int, rows_R: Tensor | None
) -> None:
    """See the package."""
    rows, dim = out_RD.shape
    device = out_RD.device
    group_G = torch.arange(column // LANES, (column + dim - 1) // LANES + 1, device=device)
    step = torch.full((), scale * 2.0**-23, dtype=torch.float32, device=device)
    skip = column % LANES
    block = max(1, BLOCK // (LANES * len(group_G)))
    for first in range(0, rows, block):
        last = min(first + block, rows)
        row_R1 = torch.arange(row + first, row + last, device=device)[:, None]
        if rows_R is not None:
            row_R1 = rows_R[first:last, None]
        counter = torch.broadcast_tensors(
            row_R1 & LOW, row_R1 >> 32, group_G, torch.zeros_like(group_G)
        )
        words = torch.stack(philox(counter, key), 2).flatten(1)[:, skip : skip + dim]
        out_RD[first:last] = ((words >> 8) - (1 << 23)).float() * step


def _high(x: Tensor) -> Tensor:
    return x >> 32 & LOW  # torch shifts in copies of the sign: clear them
