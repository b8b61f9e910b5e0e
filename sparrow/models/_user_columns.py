"""Which columns of a service's batch samples of a user share, so that products run once for them,
see `Repeated`.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from sparrow.core import Batch
from sparrow.core.repeated import Repeated


def shared_columns(batch: Batch) -> set[str]:
    """Returns the id columns that samples of a user share. batch: its numbers say whose the samples
    are.
    """
    numbers = batch.dense_BC
    assert isinstance(numbers, Repeated)
    shared: set[str] = set()
    for group, inverse_B in batch.ids.inverse_B.items():
        if inverse_B is numbers.users.inverse_B:
            shared |= set(group)
    return shared


def mark(batch: Batch, vectors_BD: Tensor, is_shared: list[bool], widths: list[int]) -> Tensor:
    """Returns vectors that stand side by side, with what samples of a user share.

    Args:
        batch: its numbers say whose the samples are.
        vectors_BD: of all features, D the sum of the widths.
        is_shared: whether samples of a user share a feature.
        widths: of the vectors.
    """
    assert isinstance(batch.dense_BC, Repeated)
    # a write into the vectors ends what is known
    marks_1D = _widen(tuple(is_shared), tuple(widths)).clone()
    return Repeated.of(vectors_BD, batch.dense_BC.users, marks_1D)


@lru_cache(maxsize=64)
def _widen(marks: tuple[bool, ...], widths: tuple[int, ...]) -> Tensor:
    """Returns each mark as often as its feature has columns, [1, sum of widths]."""
    return torch.tensor(marks).repeat_interleave(torch.tensor(widths))[None]
