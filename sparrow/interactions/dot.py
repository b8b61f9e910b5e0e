from __future__ import annotations

import torch
from torch import Tensor, nn


class DotInteraction(nn.Module):
    """Dot products of all pairs of vectors: [B, F, D] -> [B, F (F - 1) / 2].

    The strictly lower triangle of X X^T: each pair once, no vector with itself (DLRM, arXiv 1906.00091, section 2.1).
    """

    def forward(self, vectors_BFD: Tensor) -> Tensor:
        """The pairs in row-major order of the triangle: (1,0), (2,0), (2,1), ..."""
        products_BFF = vectors_BFD @ vectors_BFD.transpose(1, 2)
        count = vectors_BFD.shape[1]
        row, column = torch.tril_indices(count, count, offset=-1, device=vectors_BFD.device)
        return products_BFF.flatten(1).index_select(1, row * count + column)

    @staticmethod
    def out_features(vectors: int) -> int:
        """Pairs among so many vectors."""
        return vectors * (vectors - 1) // 2
