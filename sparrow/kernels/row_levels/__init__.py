"""Slots of rows that lie on two levels: all rows on the one below, and newer records of some on the
one above.

A bit for each row says whether it is above, and for every 64 rows it is known how many are above
before them (rank of a bitmap; Jacobson, FOCS 1989). So a lookup costs one access of memory, however
many rows are above, and all of it takes a quarter of a byte a row. A map of slots would take four
bytes a row. impl: see `sparrow.kernels`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparrow.kernels import Impl, Operator

_operator = Operator(__name__)

WORD = 64  # rows whose bits are one number


def places_of(rows_U: Tensor, rows: int) -> Tensor:
    """Returns what `slots_of` asks of the rows above: int64 [words, 2], the bits of 64 rows, and
    how many are before.

    Args:
        rows_U: int64 [U], the rows above, ascending.
        rows: how many rows there are, on both levels.
    """
    firsts_W = torch.arange(0, rows + 1, WORD)
    bits_W = torch.zeros_like(firsts_W).scatter_add_(
        0, rows_U // WORD, torch.ones_like(rows_U) << rows_U % WORD
    )
    return torch.stack([bits_W, torch.searchsorted(rows_U, firsts_W)], 1)


def slots_of(
    rows_N: Tensor,
    bounds: Sequence[int],
    places_W2: Tensor,
    begins: Sequence[int],
    below: Sequence[int],
    *,
    impl: Impl = "auto",
) -> Tensor:
    """Returns slots int64 [N]: a row that is above has the number of rows below + its place there,
    others their own.

    Args:
        rows_N: int32 or int64, key by key.
        bounds: where the rows of each key begin, and where the last key's end.
        places_W2: what `places_of` returns of all tables, one after the other.
        begins: for each key, where those of its table begin; -1 if its slots are rows.
        below: for each key, how many rows are below.
        impl: see `sparrow.kernels`.
    """
    slots_N: Tensor = _operator.choose(impl, rows_N.device).slots_of(
        rows_N, bounds, places_W2, begins, below
    )
    return slots_N


__all__ = ["WORD", "places_of", "slots_of"]
