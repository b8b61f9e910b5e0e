from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from sparrow.core.functions import applied
from sparrow.layers.precisions import Way
from sparrow.layers.rounded import multiply
from sparrow.layers.site import Site


class DotInteraction(Site):
    """Dot products of all pairs of vectors: [B, F, D] -> [B, F (F - 1) / 2].

    The strictly lower triangle of X X^T: each pair once, no vector with itself (DLRM, arXiv
    1906.00091, section 2.1). Only a recipe of its own rounds the vectors. Both gradients are one
    product, so it has no use for `weight_gradient`.
    """

    def __init__(self) -> None:
        super().__init__(high=True)

    def forward(self, vectors_BFD: Tensor) -> Tensor:
        """Returns the pairs in row-major order of the triangle: (1,0), (2,0), (2,1), ..."""
        out: Tensor = applied(_Pairs, vectors_BFD, self.way, self.watch)
        return out

    @staticmethod
    def out_features(vectors: int) -> int:
        """Returns how many pairs so many vectors have."""
        return vectors * (vectors - 1) // 2


class _Pairs(torch.autograd.Function):
    """The gradient is one product: G X with the symmetric G of all pairs. Autograd would take one
    for each factor.
    """

    @staticmethod
    def forward(ctx: Any, vectors_BFD: Tensor, how: Way | None, watch: Any) -> Tensor:
        """watch: see `Site.watch`."""
        ctx.save_for_backward(vectors_BFD)
        ctx.how = how
        ctx.watch = watch
        count = vectors_BFD.shape[1]
        row_P, column_P = torch.tril_indices(count, count, offset=-1, device=vectors_BFD.device)
        products_BFF = multiply(
            vectors_BFD,
            vectors_BFD.transpose(1, 2),
            None if how is None else how.recipe.forward,
            how,
        )
        return products_BFF.flatten(1).index_select(1, row_P * count + column_P)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BP: Tensor) -> tuple[Tensor, None, None]:
        (vectors_BFD,) = ctx.saved_tensors
        count = vectors_BFD.shape[1]
        row_P, column_P = torch.tril_indices(count, count, offset=-1, device=vectors_BFD.device)
        # the diagonal points after the last pair, where a 0 is
        pair_FF = row_P.new_full((count, count), len(row_P))
        pair_FF[row_P, column_P] = pair_FF[column_P, row_P] = torch.arange(
            len(row_P), device=row_P.device
        )
        grad_BFF = (
            F.pad(grad_BP, (0, 1)).index_select(1, pair_FF.flatten()).unflatten(1, pair_FF.shape)
        )
        if ctx.watch is not None:
            ctx.watch.tell(vectors_BFD, vectors_BFD, grad_BFF)
        return (
            multiply(grad_BFF, vectors_BFD, ctx.how and ctx.how.recipe.input_gradient, ctx.how),
            None,
            None,
        )
