"""Copies rows to the samples that share them, and sums over the samples that share a row. Both have
gradients.

The gradient of a copy is a sum, and that of a sum is a copy. On a GPU torch's own operators for
them (`index_select`, indexing, `index_add`) add in the order in which threads arrive, or in one
thread for each row. Here the order is fixed.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from sparrow.core import Jagged
from sparrow.kernels import Operator

_operator = Operator(__name__)


def expand(values_UD: Tensor, index_N: Tensor) -> Tensor:
    """Returns row index_n of `values_UD` for each n, [N, D].

    Args:
        values_UD: [U, D].
        index_N: int64 [N], 0 <= index_n < U. On a GPU nobody checks it.
    """
    # torch's gradient is in order there, and `torch.compile` sees through it
    if not values_UD.is_cuda:
        return values_UD.index_select(0, index_N)
    out_ND: Tensor = _Expand.apply(values_UD, index_N)
    return out_ND


def sum_rows(values_ND: Tensor, index_N: Tensor, count: int) -> Tensor:
    """Returns for each u the sum of the values with index_n = u, [count, D], and 0 where there is
    none.

    On a CPU it adds them in the order of n. On a GPU it does so within blocks, see
    `reference.sum_in_blocks`.

    Args:
        values_ND: [N, D].
        index_N: int64 [N], 0 <= index_n < count. On a GPU nobody checks it.
        count: how many sums there are.
    """
    if not values_ND.is_cuda:
        return values_ND.new_zeros(count, values_ND.shape[1]).index_add_(0, index_N, values_ND)
    out_UD: Tensor = _SumRows.apply(values_ND, index_N, count)
    return out_UD


def expand_jagged(listed: Jagged) -> Jagged:
    """Returns `listed.expanded()`, with the gradient of its values summed in a fixed order. values:
    [N, D].
    """
    if listed.inverse_B is None:
        return listed
    index_N, offsets_B1 = listed.places()
    weights_N = None if listed.weights_N is None else listed.weights_N[index_N]
    return Jagged(
        values_N=expand(listed.values_N, index_N), offsets_B1=offsets_B1, weights_N=weights_N
    )


class _Expand(Function):
    @staticmethod
    def forward(ctx: Any, values_UD: Tensor, index_N: Tensor) -> Tensor:
        ctx.save_for_backward(index_N)
        ctx.count = len(values_UD)
        return values_UD.index_select(0, index_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, None]:
        (index_N,) = ctx.saved_tensors
        out: Tensor = _operator.load("reference").sum_in_blocks(grad_ND, index_N, ctx.count)
        return out, None


class _SumRows(Function):
    @staticmethod
    def forward(ctx: Any, values_ND: Tensor, index_N: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(index_N)
        out: Tensor = _operator.load("reference").sum_in_blocks(values_ND, index_N, count)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_UD: Tensor) -> tuple[Tensor, None, None]:
        (index_N,) = ctx.saved_tensors
        return grad_UD.index_select(0, index_N), None, None


__all__ = ["expand", "expand_jagged", "sum_rows"]
