"""Target encoding: an id -> how often the label was 1 where training rows had it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from sparrow.core import Batch

_FOLDS = 5
_PRIOR = 20.0  # rows with the mean label that each id gets beside its own (Micci-Barreca 2001)


class TargetMeans(nn.Module):
    """The mean label of each id, drawn towards that of all rows where the id is rare, and how many
    rows had the id.

    Rows that lack a label are left out of its mean. A training row's means are of rows in other
    folds than its own, because its own label would tell itself.

    mean_RT: of all columns' ids. count_R: rows of training, by their weight.

    Args:
        rows: of the table of each column. Ids are taken modulo them.
        tasks: T.
    """

    mean_RT: Tensor
    count_R: Tensor

    def __init__(self, rows: Sequence[int], tasks: int) -> None:
        super().__init__()
        self.rows = tuple(rows)
        self.register_buffer("mean_RT", torch.zeros(sum(rows), tasks))
        self.register_buffer("count_R", torch.zeros(sum(rows)))

    def forward(self, ids_BS: Tensor) -> Tensor:
        """Returns means and counts of the ids [B, S] of S columns side by side, [B, S * (T +
        1)].
        """
        row_BS = self._places(ids_BS)
        return torch.cat([self.mean_RT[row_BS], self.count_R[row_BS][:, :, None]], 2).flatten(1)

    def fit(self, ids_NS: Tensor, batch: Batch, seed: int) -> Tensor:
        """Count training rows. Returns what `forward` would for them, with means of the other
        folds.

        Args:
            ids_NS: of the rows.
            batch: has their labels and weights.
            seed: of the folds.
        """
        assert batch.labels_BT is not None
        labels_NT = batch.labels_BT
        tasks = labels_NT.shape[1]
        weights_N = torch.ones(len(ids_NS)) if batch.weights_B is None else batch.weights_B
        weights_N1 = weights_N[:, None]
        known_NT = ~labels_NT.isnan() * weights_N1
        values_NV = torch.cat([labels_NT.nan_to_num() * weights_N1, known_NT, weights_N1], 1)
        row_NS = self._places(ids_NS)
        sums_V = values_NV.sum(0)
        total_RV = self._sums(row_NS, values_NV)
        prior_T = sums_V[:tasks] / sums_V[tasks:-1].clamp(min=1e-12)
        self.mean_RT = _means(total_RV, prior_T)
        self.count_R = total_RV[:, -1].clone()
        encoded = self(ids_NS).unflatten(1, (len(self.rows), tasks + 1))
        random = torch.Generator().manual_seed(seed)
        fold_N = torch.randint(_FOLDS, (len(ids_NS),), generator=random)
        for fold in range(_FOLDS):
            in_fold_N = fold_N == fold
            fold_sums_RV = self._sums(row_NS[in_fold_N], values_NV[in_fold_N])
            means_RT = _means(total_RV - fold_sums_RV, prior_T)  # of the other folds
            encoded[in_fold_N, :, :-1] = means_RT[row_NS[in_fold_N]]
        return encoded.flatten(1)

    def _places(self, ids_BS: Tensor) -> Tensor:
        rows_S = torch.tensor(self.rows, dtype=torch.long, device=ids_BS.device)
        return ids_BS % rows_S + rows_S.cumsum(0) - rows_S

    def _sums(self, row_NS: Tensor, values_NV: Tensor) -> Tensor:
        """Returns the sum of the values of the rows of each id, [R, V]."""
        sums_RV = torch.zeros(sum(self.rows), values_NV.shape[1])
        return sums_RV.index_add_(
            0, row_NS.flatten(), values_NV.repeat_interleave(row_NS.shape[1], 0)
        )


def _means(sums_RV: Tensor, prior_T: Tensor) -> Tensor:
    """Returns smoothed means [R, T]. sums_RV: of T labels, of the weights of rows that have each,
    and of all rows.
    """
    tasks = len(prior_T)
    return (sums_RV[:, :tasks] + _PRIOR * prior_T) / (sums_RV[:, tasks:-1] + _PRIOR)
