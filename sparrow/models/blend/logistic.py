"""A logistic regression that is fitted whole: a weight for each id of each column, and for each range of a number."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparrow.core import Batch, KeyedJagged
from sparrow.core.repeated import plain
from sparrow.metrics import ne

PENALTIES = (300.0, 100.0, 30.0, 10.0, 3.0, 1.0, 0.3)  # of half the sum of squares, beside the sum of losses


class Logistic(nn.Module):
    """logit_t = b_t + sum over id columns of the mean of their ids' weights + the weights of the numbers.

    Args:
        rows: of the table of each id column, in the batches' order. Ids are taken modulo them.
        numbers: how many numbers an example has.
        tasks: T.
    """

    weight_RT: Tensor
    numbers_XT: Tensor
    bias_T: Tensor

    def __init__(self, rows: Sequence[int], numbers: int, tasks: int) -> None:
        super().__init__()
        self.rows = tuple(rows)
        self.register_buffer("weight_RT", torch.zeros(sum(rows), tasks))
        self.register_buffer("numbers_XT", torch.zeros(numbers, tasks))
        self.register_buffer("bias_T", torch.zeros(tasks))

    def forward(self, ids: KeyedJagged, numbers_BX: Tensor) -> Tensor:
        """Returns logits [B, T]. ids: of which no sample shares rows with another (`expanded`)."""
        logits_BT = numbers_BX @ self.numbers_XT + self.bias_T
        if self.rows:
            bags, offsets = self._places(ids), ids.offsets
            found = F.embedding_bag(bags, self.weight_RT, offsets, mode="mean", include_last_offset=True)
            logits_BT = logits_BT + found.unflatten(0, (len(self.rows), -1)).sum(0)
        return logits_BT

    def _places(self, ids: KeyedJagged) -> Tensor:
        """Returns the row of weights of each id, [N]."""
        counts = torch.tensor(ids.bounds, device=ids.values_N.device).diff()
        rows = torch.tensor(self.rows, device=counts.device)
        first = F.pad(rows.cumsum(0), (1, -1))
        return ids.values_N % rows.repeat_interleave(counts) + first.repeat_interleave(counts)

    @torch.no_grad()
    def fit(self, train: Batch, valid: Batch, numbers: tuple[Tensor, Tensor], offset_T: Tensor) -> None:
        """Fit the weights to training rows by L-BFGS, with the penalty of `PENALTIES` that is best for valid ones.

        Penalties fall, and each begins where the last ended; the first that is worse for the valid rows ends it.

        Args:
            train, valid: the rows, whose ids no samples share.
            numbers: [N, X] of each.
            offset_T: is added to the logits.
        """
        design = self._design(train)
        back = design.t().to_sparse_csr()
        for task in range(len(self.bias_T)):
            self._fit_one(task, design, back, (train, valid), numbers, offset_T)

    def _design(self, batch: Batch) -> Tensor:
        """Returns the share of each weight in each row, sparse [N, R]."""
        ids, count = batch.ids, batch.batch_size
        lengths = ids.offsets.diff()
        bag_N = torch.arange(len(lengths)).repeat_interleave(lengths)
        place = torch.stack([bag_N % count, self._places(ids)]) if self.rows else torch.zeros(2, 0, dtype=torch.long)
        shares = (1 / lengths)[bag_N] if self.rows else torch.zeros(0)
        return torch.sparse_coo_tensor(place, shares, (count, len(self.weight_RT))).to_sparse_csr()

    def _fit_one(
        self,
        task: int,
        design: Tensor,
        back: Tensor,
        parts: tuple[Batch, Batch],
        numbers: tuple[Tensor, Tensor],
        offset_T: Tensor,
    ) -> None:
        (train, valid), (x_NX, _) = parts, numbers
        assert train.labels_BT is not None
        assert valid.labels_BT is not None
        y_N, of_ids = train.labels_BT[:, task], len(self.weight_RT)
        mass_N = torch.ones(len(y_N)) if train.weights_B is None else train.weights_B
        mass_N = mass_N / mass_N.sum()
        theta = torch.zeros(of_ids + x_NX.shape[1] + 1)
        best = float("inf")
        for penalty in PENALTIES:
            point = nn.Parameter(theta.clone())
            solver = torch.optim.LBFGS(
                [point], max_iter=60, history_size=10, line_search_fn="strong_wolfe", tolerance_change=1e-7
            )
            rate = penalty / len(y_N)

            def loss() -> Tensor:
                ids, x, bias = point.split([of_ids, x_NX.shape[1], 1])
                logits_N = offset_T[task] + design @ ids + x_NX @ x + bias
                each_N = F.binary_cross_entropy_with_logits(logits_N, y_N, reduction="none")
                slope_N = (torch.sigmoid(logits_N) - y_N) * mass_N
                point.grad = torch.cat(
                    [back @ slope_N + rate * ids, x_NX.t() @ slope_N + rate * x, slope_N.sum()[None]]
                )
                return (each_N * mass_N).sum() + rate / 2 * (point[:-1] ** 2).sum()

            solver.step(loss)  # type: ignore[arg-type]
            theta = point.detach()
            before = [self.weight_RT[:, task].clone(), self.numbers_XT[:, task].clone(), self.bias_T[task].clone()]
            ids, x, bias = theta.split([of_ids, x_NX.shape[1], 1])
            self._set(task, ids, x, bias[0])
            scores_N = torch.sigmoid(self(valid.ids, numbers[1])[:, task] + offset_T[task])
            found = ne(scores_N, valid.labels_BT[:, task], valid.weights_B)
            if not found < best:
                self._set(task, *before)
                break
            best = found

    def _set(self, task: int, ids_R: Tensor, numbers_X: Tensor, bias: Tensor) -> None:
        self.weight_RT[:, task] = ids_R
        self.numbers_XT[:, task] = numbers_X
        self.bias_T[task] = bias


def together(dense_BC: Tensor, encoded_BCK: Tensor) -> Tensor:
    """Returns the numbers that a logistic regression reads: of all ranges, and the columns themselves, [B, C K + C]."""
    return torch.cat([encoded_BCK.flatten(1), plain(dense_BC)], 1)
