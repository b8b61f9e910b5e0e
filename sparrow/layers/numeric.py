from __future__ import annotations

import torch
from torch import Tensor, nn


class NumericEmbedding(nn.Module):
    """A vector for each dense column, times its value: [B, C] -> [B, C * D], columns side by side, w ~ N(0, 1 / D).

    So that a number meets other features as an id does (AutoInt, arXiv 1810.11921, section 4.3).
    """

    def __init__(self, columns: int, dim: int) -> None:
        super().__init__()
        self.weight_CD = nn.Parameter(torch.randn(columns, dim) / dim**0.5)
        self.out_features = columns * dim

    def forward(self, dense_BC: Tensor) -> Tensor:
        """The scaled vectors."""
        return (dense_BC[:, :, None] * self.weight_CD).flatten(1)
