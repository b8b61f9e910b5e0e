"""Dropout that a run can repeat: what is dropped depends on the seed, the row and the layer alone.

So it is the same on any number of ranks, and in a run that was resumed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparrow.core.errors import require
from sparrow.kernels.philox import key_of, uniform_


@dataclass
class _Draws:
    """What is drawn in a forward. layers: how many have drawn."""

    seed: int
    rows_B: Tensor | None
    layers: int = 0


# ambient: `forward` of every model and of every layer around a dropout would else take the draws.
# All layers of a forward share them, since the number of a layer is its place among the calls.
_DRAWS: ContextVar[_Draws | None] = ContextVar("draws", default=None)


@contextmanager
def drawing(seed: int, rows_B: Tensor | None) -> Iterator[None]:
    """Returns a context for one forward of a batch in training.

    Args:
        seed: the run's.
        rows_B: int64 [B], the number of each row in the training. None where nothing is dropped,
            see `drops`.
    """
    token = _DRAWS.set(_Draws(seed, rows_B))
    try:
        yield
    finally:
        _DRAWS.reset(token)


class Dropout(nn.Module):
    """In training a share of the numbers of each sample is 0, and the others are divided by 1 -
    share.

    It is the one layer that draws in training. Whatever a model drops goes through it, so that
    `drops` sees it.

    Args:
        share: 0 to 0.9.

    Raises:
        UserError: for another share.
    """

    def __init__(self, share: float) -> None:
        super().__init__()
        require(least=0, most=0.9, **{"model.dropout": share})
        self.share = share

    def forward(self, x: Tensor) -> Tensor:
        """Returns numbers of the shape of x, [B, ...]; x itself where nothing is dropped.

        Outside of `drawing`, as in a loop of one's own, torch's generator draws.
        """
        if not (self.training and self.share):
            return x
        draws = _DRAWS.get()
        if draws is None:
            return F.dropout(x, self.share)
        assert draws.rows_B is not None, "rows without numbers; see `Loader.with_rows`"
        drawn_BH = torch.empty(
            x.shape[0], x.shape[1:].numel(), dtype=torch.float32, device=x.device
        )
        # of [-1, 1)
        uniform_(drawn_BH, key_of(draws.seed, f"dropout {draws.layers}"), 1.0, rows_R=draws.rows_B)
        draws.layers += 1
        return x * ((drawn_BH.view(x.shape) >= 2 * self.share - 1) / (1 - self.share)).to(x.dtype)


def drops(model: nn.Module) -> bool:
    """Whether a model draws in training."""
    return any(isinstance(module, Dropout) and module.share > 0 for module in model.modules())
