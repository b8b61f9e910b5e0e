"""A logistic regression that is fitted whole: a weight for each id of each column, and for each range of a number."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparrow.core import Batch, KeyedJagged, UserError
from sparrow.layers import Matmul
from sparrow.losses import binary_cross_entropy

# of half the sum of squares, beside the sum of losses
PENALTIES = (3000.0, 1000.0, 300.0, 100.0, 30.0, 10.0, 3.0, 1.0, 0.3)

Places = tuple[Tensor, Tensor]
"""Of each number, which range it is in and how far it is through it, [B, C] each; see `PiecewiseLinear.places`."""


class Logistic(nn.Module):
    """logit_t = b_t + the mean weight of each column's ids + a line and a piecewise linear function of each number.

    The function of a number rises in each range by a weight of its own. So its values where ranges meet are sums.

    ids_RT: has no rows before it is fitted.

    Args:
        rows: of the table of each id column, in the batches' order. Ids are taken modulo them.
        numbers: C, how many numbers an example has.
        ranges: K of each number.
        tasks: T.
    """

    ids_RT: Tensor
    lines_CT: Tensor
    rises_CKT: Tensor
    bias_T: Tensor

    def __init__(self, rows: Sequence[int], numbers: int, ranges: int, tasks: int) -> None:
        super().__init__()
        self.rows = tuple(rows)
        sizes = {"ids_RT": (0,), "lines_CT": (numbers,), "rises_CKT": (numbers, ranges), "bias_T": ()}
        for name, size in sizes.items():
            self.register_buffer(name, torch.zeros(*size, tasks))
        self.lines = Matmul(high=True)  # it was fitted in fp32

    def forward(self, ids: KeyedJagged, dense_BC: Tensor, places: Places) -> Tensor:
        """Returns logits [B, T]. ids: of which no sample shares rows with another (`expanded`)."""
        range_BC, through_BC = places
        heights_CKT = _heights(self.rises_CKT)
        column_C = torch.arange(dense_BC.shape[1], device=dense_BC.device)
        low_BCT, high_BCT = heights_CKT[column_C, range_BC], heights_CKT[column_C, range_BC + 1]
        of_numbers_BT = torch.lerp(low_BCT, high_BCT, through_BC[:, :, None]).sum(1)
        of_numbers_BT = of_numbers_BT + self.lines(dense_BC, self.lines_CT, weights=True)
        if not len(self.ids_RT):
            return of_numbers_BT + self.bias_T
        found_LT = F.embedding_bag(self._rows(ids), self.ids_RT, ids.offsets, mode="mean", include_last_offset=True)
        return found_LT.unflatten(0, (len(self.rows), -1)).sum(0) + of_numbers_BT + self.bias_T

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Takes in as many weights as were saved."""
        self.ids_RT = torch.empty_like(state.get(f"{prefix}ids_RT", self.ids_RT))
        if len(self.ids_RT) not in (0, sum(self.rows)):  # a row would be the weight of another id
            what = f"a logistic regression of {len(self.ids_RT):,} ids, and this log has {sum(self.rows):,}"
            raise UserError(f"model.logistic: {what}; train without init_from, or on the same prepared log")
        super()._load_from_state_dict(state, prefix, *rest)

    def _rows(self, ids: KeyedJagged) -> Tensor:
        """Returns the row of weights of each id, [N]."""
        counts = torch.tensor(ids.bounds, device=ids.values_N.device).diff()
        rows = torch.tensor(self.rows, dtype=torch.long, device=counts.device)
        first = rows.cumsum(0) - rows
        return ids.values_N % rows.repeat_interleave(counts) + first.repeat_interleave(counts)

    def fit(self, parts: tuple[Batch, Batch], places: tuple[Places, Places], offsets: tuple[Tensor, Tensor]) -> None:
        """Fit the weights to training rows by L-BFGS, with the penalty of `PENALTIES` that is best for valid ones.

        Penalties fall, and each begins where the last ended. The first that is worse for the valid rows ends it. What
        is fitted is the sum of bias and offset. So the weights do not depend on the offset, which is of other parts.

        Args:
            parts: training rows and valid ones, whose ids no samples share.
            places: of the numbers of each.
            offsets: are added to the logits of each.
        """
        self.ids_RT = torch.zeros(sum(self.rows), len(offsets[0]))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Sparse")  # torch calls them beta; these products are tested here
            designs = [self._design(batch, at) for batch, at in zip(parts, places, strict=True)]
            back = designs[0].t().to_sparse_csr()
        assert parts[0].labels_BT is not None
        begin_T = torch.logit(parts[0].labels_BT.nanmean(0).nan_to_num(0.5), eps=1e-6)
        point = [nn.Parameter(of.clone()) for of in (*list(self.buffers())[:-1], begin_T)]
        beside_T = offsets[1] - offsets[0]  # valid rows may have more negatives

        def loss(part: int) -> Tensor:
            ids_RT, lines_CT, rises_CKT, bias_T = point
            weights_WT = torch.cat([ids_RT, lines_CT, _heights(rises_CKT).flatten(0, 1)])
            logits_NT = _Times.apply(weights_WT, designs[part], back) + bias_T + part * beside_T
            return binary_cross_entropy(logits_NT, parts[part])

        best = float("inf")
        for penalty in PENALTIES:
            _descend(point, lambda: loss(0), penalty / parts[0].batch_size / len(offsets[0]))
            with torch.no_grad():
                found = float(loss(1))
                if not found < best:
                    break
                best = found
                for weights, fitted in zip(self.buffers(), point, strict=True):
                    weights.copy_(fitted)
                self.bias_T.sub_(offsets[0])

    def _design(self, batch: Batch, places: Places) -> Tensor:
        """Returns how much of each weight each row has, sparse [N, R + C + C (K + 1)]: of ids, lines and heights."""
        assert batch.ids.lengths is not None
        count, (range_NC, through_NC), lengths_L = batch.batch_size, places, batch.ids.lengths
        list_N = torch.arange(len(lengths_L)).repeat_interleave(lengths_L)
        columns, heights = self.lines_CT.shape[0], self.rises_CKT.shape[1] + 1
        line_C = len(self.ids_RT) + torch.arange(columns)
        low_NC = len(self.ids_RT) + columns + torch.arange(columns) * heights + range_NC
        of_numbers = [line_C.expand(count, -1), low_NC, low_NC + 1]
        shares = [batch.dense_BC, 1 - through_NC, through_NC]
        row_NC = torch.arange(count)[:, None].expand(-1, columns)
        rows_P = torch.cat([list_N % max(count, 1), *(row_NC.flatten() for _ in shares)])
        weights_P = torch.cat([self._rows(batch.ids), *(of.flatten() for of in of_numbers)])
        shares_P = torch.cat([(1 / lengths_L)[list_N], *(share.flatten() for share in shares)])
        size = (count, len(self.ids_RT) + columns * (heights + 1))
        return torch.sparse_coo_tensor(torch.stack([rows_P, weights_P]), shares_P, size).to_sparse_csr()


def _heights(rises_CKT: Tensor) -> Tensor:
    """Returns the values of piecewise linear functions where ranges begin and end, [C, K + 1, T]."""
    return F.pad(rises_CKT.cumsum(1), (0, 0, 1, 0))


class _Times(torch.autograd.Function):
    """The sparse product of `design` [N, W] and weights [W, T]; `back` is the transpose of the one that is trained."""

    @staticmethod
    def forward(ctx: Any, weights_WT: Tensor, design: Tensor, back: Tensor) -> Tensor:
        ctx.back = back
        return design @ weights_WT

    @staticmethod
    def backward(ctx: Any, grad_NT: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.back @ grad_NT, None, None


def _descend(point: list[nn.Parameter], loss: Callable[[], Tensor], rate: float) -> None:
    """Move to the least of the loss and rate / 2 times the sum of squares of all but the bias."""
    solver = torch.optim.LBFGS(
        point, max_iter=60, history_size=10, line_search_fn="strong_wolfe", tolerance_change=1e-7
    )

    def value() -> float:
        solver.zero_grad()
        squares = torch.stack([(weights**2).sum() for weights in point[:-1]])
        total = loss() + rate / 2 * squares.sum()
        total.backward()
        return total.item()

    solver.step(value)
