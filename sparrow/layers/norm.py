from __future__ import annotations

from torch import Tensor, nn


class LayerNorm(nn.LayerNorm):
    """torch's, of inputs that are narrower than its weights too: on a GPU torch wants one type for both."""

    def forward(self, x: Tensor) -> Tensor:
        """Returns the normed vectors; on a GPU in the type of the weights."""
        return super().forward(x.to(self.weight.dtype) if x.is_cuda else x)
