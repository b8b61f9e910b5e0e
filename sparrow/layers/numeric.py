from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from sparrow.core.functions import applied
from sparrow.core.plain import Informed, plain
from sparrow.kernels import dense
from sparrow.layers.precision import compute_dtype


class NumericEmbedding(nn.Module):
    """A learned vector for each dense column, times the column's value: [B, C] -> [B, C * D],
    columns side by side.

    So a number meets other features in the way an id does (AutoInt, arXiv 1810.11921, section 4.3).
    The vectors begin as N(0, 1 / D).

    Args:
        columns: C.
        dim: D.
    """

    def __init__(self, columns: int, dim: int) -> None:
        super().__init__()
        self.weight_CD = nn.Parameter(torch.randn(columns, dim) / dim**0.5)
        self.out_features = columns * dim

    def forward(self, dense_BC: Tensor, rest_BR: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the inputs of the next layer in two forms, which give the same products.

        The first has the scaled vectors and the rest side by side, [B, C * D + R]. The second has
        the numbers and the rest, [B, P + R], where P is C filled up to a multiple of 16 with
        columns of 0. It is for products with a weight of `fold`.

        Args:
            dense_BC: the numbers.
            rest_BR: further inputs.
        """
        numbers = plain(dense_BC)
        rest = plain(rest_BR)
        wide, narrow = applied(_Beside, numbers, self.weight_CD, rest, compute_dtype(rest))
        if isinstance(dense_BC, Informed) or isinstance(rest_BR, Informed):
            from sparrow.core.repeated import keep_marks  # who made them has loaded it

            return keep_marks((wide, narrow), self._marks, dense_BC, rest_BR)
        return wide, narrow

    def _marks(self, dense_BC: Tensor, rest_BR: Tensor) -> tuple[Tensor, Tensor]:
        """Returns what users' samples share of the two forms, see `Repeated`."""
        from sparrow.core.repeated import marks_of_one  # as above

        numbers = marks_of_one(dense_BC)
        rest = marks_of_one(rest_BR)
        scaled = numbers[:, :, None].expand(-1, *self.weight_CD.shape).flatten(1)
        # its columns of 0 are all alike
        filled = F.pad(numbers, (0, -numbers.shape[1] % dense.ALIGNED), value=True)
        return torch.cat([scaled, rest], 1), torch.cat([filled, rest], 1)

    def fold(self, weight: Tensor) -> Tensor:
        """Returns the weight [out, P + R] for the second form of `forward`, given the one for the
        first.

        W (x_c w_c) is (W w_c) x_c, so the D products of a column become one.

        weight: [out, C * D + R].
        """
        columns_weight, rest_weight = weight.split(
            [self.out_features, weight.shape[1] - self.out_features], 1
        )
        folded = (columns_weight.unflatten(1, self.weight_CD.shape) * self.weight_CD).sum(2)
        return torch.cat([F.pad(folded, (0, -folded.shape[1] % dense.ALIGNED)), rest_weight], 1)


class _Beside(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, dense_BC: Tensor, weight_CD: Tensor, rest_BR: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(dense_BC)
        ctx.shape = weight_CD.shape
        return dense.beside(dense_BC, weight_CD, rest_BR, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_wide: Tensor, grad_narrow: Tensor) -> tuple[Tensor | None, ...]:
        (dense_BC,) = ctx.saved_tensors
        grad_weight, grad_rest = dense.beside_backward(
            grad_wide, grad_narrow, dense_BC, ctx.shape[1]
        )
        return None, grad_weight.view(ctx.shape), grad_rest, None
