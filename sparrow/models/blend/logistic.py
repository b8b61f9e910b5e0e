"""A logistic regression that is fitted whole: a weight for each id of each column, and for each range of a number."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparrow.core import Batch, KeyedJagged
from sparrow.core.repeated import plain
from sparrow.losses import binary_cross_entropy

PENALTIES = (300.0, 100.0, 30.0, 10.0, 3.0, 1.0, 0.3)  # of half the sum of squares, beside the sum of losses


class Logistic(nn.Module):
    """logit_t = b_t + the sum over id columns of the mean of their ids' weights + the weights of the numbers.

    Args:
        rows: of the table of each id column, in the batches' order. Ids are taken modulo them.
        numbers: X, how many numbers an example has.
        tasks: T.
    """

    def __init__(self, rows: Sequence[int], numbers: int, tasks: int) -> None:
        super().__init__()
        self.rows = tuple(rows)
        for name, size in (("ids_RT", sum(rows)), ("numbers_XT", numbers), ("bias_1T", 1)):
            self.register_buffer(name, torch.zeros(size, tasks))

    def forward(self, ids: KeyedJagged, numbers_BX: Tensor) -> Tensor:
        """Returns logits [B, T]. ids: of which no sample shares rows with another (`expanded`)."""
        logits_BT = numbers_BX @ self.numbers_XT + self.bias_1T
        if not self.rows:
            return logits_BT
        found_LT = F.embedding_bag(self._places(ids), self.ids_RT, ids.offsets, mode="mean", include_last_offset=True)
        return logits_BT + found_LT.unflatten(0, (-1, numbers_BX.shape[0])).sum(0)

    def _places(self, ids: KeyedJagged) -> Tensor:
        """Returns the row of weights of each id, [N]."""
        counts = torch.tensor(ids.bounds, device=ids.values_N.device).diff()
        rows = torch.tensor(self.rows, dtype=torch.long, device=counts.device)
        first = rows.cumsum(0) - rows
        return ids.values_N % rows.repeat_interleave(counts) + first.repeat_interleave(counts)

    def fit(self, train: Batch, valid: Batch, numbers: tuple[Tensor, Tensor], offset_T: Tensor) -> None:
        """Fit the weights to training rows by L-BFGS, with the penalty of `PENALTIES` that is best for valid ones.

        Penalties fall, and each begins where the last ended. The first that is worse for the valid rows ends it.

        Args:
            train, valid: the rows, whose ids no samples share.
            numbers: [N, X] of each.
            offset_T: is added to the logits.
        """
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Sparse")  # torch calls them beta; these products are tested here
            designs = [self._design(batch.ids, batch.batch_size) for batch in (train, valid)]
            back = designs[0].t().to_sparse_csr()
        point = [nn.Parameter(weights.clone()) for weights in self.buffers()]

        def logits_NT(of: int) -> Tensor:
            ids_RT, numbers_XT, bias_1T = point
            return _Times.apply(ids_RT, designs[of], back) + numbers[of] @ numbers_XT + bias_1T + offset_T

        best = float("inf")
        for penalty in PENALTIES:
            rate = penalty / train.batch_size / offset_T.numel()
            _descend(point, lambda: binary_cross_entropy(logits_NT(0), train), rate)
            with torch.no_grad():
                found = float(binary_cross_entropy(logits_NT(1), valid))
                if not found < best:
                    break
                best = found
                for weights, fitted in zip(self.buffers(), point, strict=True):
                    weights.copy_(fitted)

    def _design(self, ids: KeyedJagged, rows: int) -> Tensor:
        """Returns how much of each id's weight each row has, sparse [N, R]."""
        lengths_L = ids.offsets.diff()
        list_N = torch.arange(len(lengths_L)).repeat_interleave(lengths_L)
        places = torch.stack([list_N % max(rows, 1), self._places(ids)])
        found = torch.sparse_coo_tensor(places, (1 / lengths_L)[list_N], (rows, len(self.ids_RT)))
        return found.to_sparse_csr()


class _Times(torch.autograd.Function):
    """The sparse product of `design` [N, R] and weights [R, T]; `back` is its transpose."""

    @staticmethod
    def forward(ctx: Any, weights_RT: Tensor, design: Tensor, back: Tensor) -> Tensor:
        ctx.back = back
        return design @ weights_RT

    @staticmethod
    def backward(ctx: Any, grad_NT: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.back @ grad_NT, None, None


def _descend(point: list[nn.Parameter], loss: Callable[[], Tensor], rate: float) -> None:
    """Move to the least of the loss and rate / 2 times the sum of squares of all but the bias."""
    solver = torch.optim.LBFGS(
        point, max_iter=60, history_size=10, line_search_fn="strong_wolfe", tolerance_change=1e-7
    )

    def value() -> Tensor:
        solver.zero_grad()
        total = loss() + rate / 2 * sum((weights**2).sum() for weights in point[:-1])
        total.backward()
        return total

    solver.step(value)


def together(dense_BC: Tensor, encoded_BCK: Tensor) -> Tensor:
    """Returns the numbers that a logistic regression reads: of all ranges, and the columns themselves, [B, C K + C]."""
    return torch.cat([encoded_BCK.flatten(1), plain(dense_BC)], 1)
