"""Weights that ids have in a row of a matrix, without a table."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparrow.core import KeyedJagged


class MeanOfIds(nn.Module):
    """The mean of the weights of each column's ids, added up over the columns; 0 for a column
    without ids.

    Columns have their rows one after the other. `sparrow convert` has another one where lists are
    padded.

    firsts: of each column, which row is its first.

    Args:
        rows: of each column, in the batches' order. Ids are taken modulo them.
    """

    def __init__(self, rows: Sequence[int]) -> None:
        super().__init__()
        self.rows = tuple(rows)
        self.firsts = tuple(sum(rows[:column]) for column in range(len(rows)))

    def forward(self, ids: KeyedJagged, weights_RT: Tensor) -> Tensor:
        """Returns [B, T]. ids: of which no sample shares rows with another (`expanded`)."""
        means_LT = F.embedding_bag(
            self.rows_of(ids), weights_RT, ids.offsets, mode="mean", include_last_offset=True
        )
        return means_LT.unflatten(0, (len(self.rows), -1)).sum(0)

    def rows_of(self, ids: KeyedJagged) -> Tensor:
        """Returns the row of weights of each id, [N]."""
        counts = torch.tensor(ids.bounds, device=ids.values_N.device).diff()
        rows = torch.tensor(self.rows, dtype=torch.long, device=counts.device)
        firsts = torch.tensor(self.firsts, dtype=torch.long, device=counts.device)
        return ids.values_N % rows.repeat_interleave(counts) + firsts.repeat_interleave(counts)
