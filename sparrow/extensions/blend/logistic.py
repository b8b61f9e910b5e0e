"""A logistic regression that is fitted whole: a weight for each id of each column, and for each
range of a number.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparrow.core import Batch, KeyedJagged, UserError
from sparrow.core.memory import let_go
from sparrow.extensions.blend.ranges import Places, locate
from sparrow.features.schema import Schema
from sparrow.layers.ids import MeanOfIds
from sparrow.layers.site import Matmul
from sparrow.losses import binary_cross_entropy
from sparrow.models._inputs import tasks
from sparrow.optimizers import lean

# of half the sum of squares, beside the sum of losses
PENALTIES = (3000.0, 1000.0, 300.0, 100.0, 30.0, 10.0, 3.0, 1.0, 0.3)

PIECE = 1 << 13  # rows of the design that are made at a time


class Logistic(nn.Module):
    """logit_t = b_t + the mean weight of each column's ids + a line and a piecewise linear function
    of each number.

    The function of a number rises in each range by a weight of its own. So its values where ranges
    meet are sums.

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
        self.ids = MeanOfIds(rows)
        sizes = {
            "ids_RT": (0,),
            "lines_CT": (numbers,),
            "rises_CKT": (numbers, ranges),
            "bias_T": (),
        }
        for name, size in sizes.items():
            self.register_buffer(name, torch.zeros(*size, tasks))
        self.lines = Matmul(high=True)  # it was fitted in fp32

    def forward(self, ids: KeyedJagged, dense_BC: Tensor, knots_CK1: Tensor) -> Tensor:
        """Returns logits [B, T].

        Args:
            ids: of which no sample shares rows with another (`expanded`).
            dense_BC: numbers.
            knots_CK1: where their ranges begin and end.
        """
        range_BC, through_BC = locate(dense_BC, knots_CK1)
        heights_CKT = _heights(self.rises_CKT)
        column_C = torch.arange(dense_BC.shape[1], device=dense_BC.device)
        low_BCT = heights_CKT[column_C, range_BC]
        high_BCT = heights_CKT[column_C, range_BC + 1]
        numbers_BT = torch.lerp(low_BCT, high_BCT, through_BC[:, :, None]).sum(1)
        numbers_BT = numbers_BT + self.lines(dense_BC, self.lines_CT, weights=True)
        if not len(self.ids_RT):
            return numbers_BT + self.bias_T
        return self.ids(ids, self.ids_RT) + numbers_BT + self.bias_T

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Takes in as many weights as were saved."""
        self.ids_RT = torch.empty_like(state.get(f"{prefix}ids_RT", self.ids_RT))
        # a row would be the weight of another id
        if len(self.ids_RT) not in (0, sum(self.ids.rows)):
            raise UserError(
                f"model.logistic: a logistic regression of {len(self.ids_RT):,} ids, and this log"
                f" has {sum(self.ids.rows):,}; train without init_from, or on the same prepared log"
            )
        super()._load_from_state_dict(state, prefix, *rest)

    def fit(
        self, parts: tuple[Batch, Batch], knots_CK1: Tensor, offsets: tuple[Tensor, Tensor]
    ) -> None:
        """Fit the weights to training rows by L-BFGS, with the penalty of `PENALTIES` that is best
        for valid ones.

        Penalties fall, and each begins where the last ended. The first that is worse for the valid
        rows ends it. What is fitted is the sum of bias and offset. So the weights do not depend on
        the offset, which is of other parts.

        Args:
            parts: training rows and valid ones, whose ids no samples share.
            knots_CK1: where the ranges of their numbers begin and end.
            offsets: are added to the logits of each.
        """
        self.ids_RT = torch.zeros(sum(self.ids.rows), len(offsets[0]))
        with warnings.catch_warnings():
            # torch calls them beta; these products are tested here
            warnings.filterwarnings("ignore", "Sparse")
            designs = [self._design(batch, locate(batch.dense_BC, knots_CK1)) for batch in parts]
            back = _transposed(designs[0])
            let_go()  # the pieces
        assert parts[0].labels_BT is not None
        begin_T = torch.logit(parts[0].labels_BT.nanmean(0).nan_to_num(0.5), eps=1e-6)
        point = [nn.Parameter(weights.clone()) for weights in (*list(self.buffers())[:-1], begin_T)]
        valid_offset_T = offsets[1] - offsets[0]  # valid rows may have more negatives

        def loss(part: int) -> Tensor:
            ids_RT, lines_CT, rises_CKT, bias_T = point
            weights_WT = torch.cat([ids_RT, lines_CT, _heights(rises_CKT).flatten(0, 1)])
            products_NT = _Times.apply(weights_WT, designs[part], back)
            logits_NT = products_NT + bias_T + part * valid_offset_T
            return binary_cross_entropy(logits_NT, parts[part])

        best = float("inf")
        for penalty in PENALTIES:
            _descend(point, lambda: loss(0), penalty / parts[0].batch_size / len(offsets[0]))
            with torch.no_grad():
                valid_loss = float(loss(1))
                if not valid_loss < best:
                    break
                best = valid_loss
                for weights, fitted in zip(self.buffers(), point, strict=True):
                    weights.copy_(fitted)
                self.bias_T.sub_(offsets[0])

    def _design(self, batch: Batch, places: Places) -> Tensor:
        """Returns how much of each weight each row has, sparse [N, R + C + C (K + 1)]: of ids,
        lines and heights.

        It is made of some rows at a time, since torch takes 100 bytes for each of its numbers on
        the way.
        """
        columns = self.lines_CT.shape[0]
        # fewer where a list repeats an id
        most = len(batch.ids.values_N) + 3 * columns * batch.batch_size
        weights = len(self.ids_RT) + columns * (self.rises_CKT.shape[1] + 2)
        columns_P = torch.empty(most, dtype=torch.int64)
        shares_P = torch.empty(most)
        lengths = []
        filled = 0
        for first in range(0, batch.batch_size, PIECE) or [0]:
            rows = slice(first, min(first + PIECE, batch.batch_size))
            piece_places = (places[0][rows], places[1][rows])
            piece = self._design_piece(batch.part(rows.start, rows.stop), piece_places)
            end = filled + len(piece.values())
            columns_P[filled:end] = piece.col_indices()
            shares_P[filled:end] = piece.values()
            lengths.append(piece.crow_indices().diff())
            filled = end
        size = (batch.batch_size, weights)
        return torch.sparse_csr_tensor(
            _ends(torch.cat(lengths)), columns_P[:filled], shares_P[:filled], size
        )

    def _design_piece(self, batch: Batch, places: Places) -> Tensor:
        assert batch.ids.lengths is not None
        count = batch.batch_size
        range_NC, through_NC = places
        lengths_L = batch.ids.lengths
        list_N = torch.arange(len(lengths_L)).repeat_interleave(lengths_L)
        columns = self.lines_CT.shape[0]
        heights = self.rises_CKT.shape[1] + 1
        line_C = len(self.ids_RT) + torch.arange(columns)
        low_NC = len(self.ids_RT) + columns + torch.arange(columns) * heights + range_NC
        columns_NC = [line_C.expand(count, -1), low_NC, low_NC + 1]
        shares = [batch.dense_BC, 1 - through_NC, through_NC]
        row_NC = torch.arange(count)[:, None].expand(-1, columns)
        rows_P = torch.cat([list_N % max(count, 1), *(row_NC.flatten() for _ in shares)])
        weights_P = torch.cat(
            [self.ids.rows_of(batch.ids), *(column_NC.flatten() for column_NC in columns_NC)]
        )
        shares_P = torch.cat([(1 / lengths_L)[list_N], *(share.flatten() for share in shares)])
        size = (count, len(self.ids_RT) + columns * (heights + 1))
        return torch.sparse_coo_tensor(
            torch.stack([rows_P, weights_P]), shares_P, size
        ).to_sparse_csr()


def bytes_of_examples(schema: Schema, batch: Batch, rows: tuple[int, int]) -> int:
    """Returns about how many bytes of memory the examples of a fit take. The arguments are those of
    `bytes_of_fit`.
    """
    bytes_row = replace(batch, ids=batch.ids.expanded()).nbytes / batch.batch_size
    # with ranges of numbers, and places in them
    return int(sum(rows) * (bytes_row + 20 * len(schema.numbers)))


def bytes_of_fit(schema: Schema, batch: Batch, rows: tuple[int, int]) -> int:
    """Returns about how many bytes of memory `Logistic.fit` takes beside its examples.

    Args:
        schema: of the log.
        batch: some rows of the log.
        rows: how many there are of the training part and of the valid one.
    """
    weights = sum(ids_of_columns(schema)) * tasks(schema)
    # of a row of the design
    entries = len(batch.ids.expanded().values_N) / batch.batch_size + 3 * len(schema.numbers)
    # a place and a share each, and of training the transpose too
    designs = 12 * entries * (2 * rows[0] + rows[1])
    losses = max(220 * rows[0], 130 * rows[1])  # of valid rows nothing is kept for gradients
    descent = 30 * 4 * weights + losses  # ten steps and gradients
    return int(designs + descent + 110 * entries * min(PIECE, max(rows)))


def ids_of_columns(schema: Schema) -> list[int]:
    """Returns how many rows the table of each id column has, in the batches' order; 0 where the log
    does not say.
    """
    encodings = [schema.encodings[str(schema.columns[name].table)] for name in schema.sparse]
    return [encoding.rows or 0 for encoding in encodings]


def _ends(lengths_N: Tensor) -> Tensor:
    return F.pad(lengths_N.cumsum(0), (1, 0))


def _transposed(design: Tensor) -> Tensor:
    """Returns the transpose of a sparse matrix in the same layout. Entries of each row are in the
    order of the columns.

    Some rows are moved at a time: torch takes 60 bytes for each number on the way.
    """
    starts_N = design.crow_indices()
    columns_P = design.col_indices()
    shares_P = design.values()
    counts_W = torch.bincount(columns_P, minlength=design.shape[1])
    ends_W = _ends(counts_W)
    next_W = ends_W[:-1].clone()
    row_P = torch.empty_like(columns_P)
    share_P = torch.empty_like(shares_P)
    for first in range(0, len(design), PIECE):
        last = min(first + PIECE, len(design))
        at = slice(int(starts_N[first]), int(starts_N[last]))
        row_Q = torch.arange(first, last).repeat_interleave(starts_N[first : last + 1].diff())
        column_Q, order_Q = columns_P[at].sort(stable=True)
        count_W = torch.bincount(column_Q, minlength=len(next_W))
        within_Q = torch.arange(len(column_Q)) - (count_W.cumsum(0) - count_W)[column_Q]
        place_Q = next_W[column_Q] + within_Q
        row_P[place_Q] = row_Q[order_Q]
        share_P[place_Q] = shares_P[at][order_Q]
        next_W += count_W
    return torch.sparse_csr_tensor(ends_W, row_P, share_P, (design.shape[1], len(design)))


def _heights(rises_CKT: Tensor) -> Tensor:
    """Returns the values of piecewise linear functions where ranges begin and end, [C, K + 1,
    T].
    """
    return F.pad(rises_CKT.cumsum(1), (0, 0, 1, 0))


class _Times(torch.autograd.Function):
    """The sparse product of `design` [N, W] and weights [W, T]; `back` is the transpose of the one
    that is trained.
    """

    @staticmethod
    def forward(ctx: Any, weights_WT: Tensor, design: Tensor, back: Tensor) -> Tensor:
        ctx.back = back
        return design @ weights_WT

    @staticmethod
    def backward(ctx: Any, grad_NT: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.back @ grad_NT, None, None


def _descend(point: list[nn.Parameter], loss: Callable[[], Tensor], rate: float) -> None:
    """Move to the least of the loss and rate / 2 times the sum of squares of all but the bias."""
    solver = lean(torch.optim.LBFGS)(
        point, max_iter=60, history_size=10, line_search_fn="strong_wolfe", tolerance_change=1e-7
    )

    def value() -> float:
        solver.zero_grad()
        squares = torch.stack([(weights**2).sum() for weights in point[:-1]])
        total = loss() + rate / 2 * squares.sum()
        total.backward()
        return total.item()

    solver.step(value)
