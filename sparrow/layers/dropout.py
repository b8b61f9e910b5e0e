"""Dropout that a run can repeat: what is dropped depends on the seed, the row and the layer alone.

So it is the same on any number of ranks, and in a run that was resumed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from sparrow.kernels.philox import key_of, uniform_


@dataclass
class _Draws:
    """What is drawn in a forward. layers: how many have drawn."""

    seed: int
    rows_B: Tensor
    layers: int = 0


_DRAWS: ContextVar[_Draws | None] = ContextVar("draws", default=None)


@contextmanager
def drawing(seed: int, rows_B: Tensor | None) -> Iterator[None]:
    """Returns a context for one forward of a batch in training.

    Args:
        seed: the run's.
        rows_B: int64 [B], the number of each row in the training; None draws from torch's generator.
    """
    token = _DRAWS.set(None if rows_B is None else _Draws(seed, rows_B))
    try:
        yield
    finally:
        _DRAWS.reset(token)


def dropped(x_BH: Tensor, share: float) -> Tensor:
    """Returns x, of which a share of the numbers is 0 and the others are divided by 1 - share.

    Args:
        x_BH: [B, H], a row for each sample.
        share: 0 <= share < 1.
    """
    draws = _DRAWS.get()
    if draws is None:
        return F.dropout(x_BH, share)
    drawn_BH = torch.empty(x_BH.shape, dtype=torch.float32, device=x_BH.device)
    uniform_(drawn_BH, key_of(draws.seed, f"dropout {draws.layers}"), 1.0, rows_R=draws.rows_B)  # of [-1, 1)
    draws.layers += 1
    return x_BH * ((drawn_BH >= 2 * share - 1) / (1 - share)).to(x_BH.dtype)
