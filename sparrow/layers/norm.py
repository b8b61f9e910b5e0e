from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BLOCK, EPS = 256, 1e-5  # EPS is added to the mean square


class LayerNorm(nn.LayerNorm):
    """torch's, of inputs that are narrower than its weights too: on a GPU torch wants one type for
    both.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Returns the normed vectors; on a GPU in the type of the weights."""
        return super().forward(x.to(self.weight.dtype) if x.is_cuda else x)


class BlockNorm(nn.Module):
    """x over the root mean square of its block: 256 neighbours along the last dimension, the last
    block may be short.

    LoKA's norm in the place of a layer norm (arXiv 2605.10886). It has no parameters and subtracts
    no mean. Where a layer norm subtracts a mean of c from numbers with a spread of s, it makes
    relative errors c / s times as large. The paper's `view(-1, 256)` would mix examples where 256
    does not divide the width; here no block spans two.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Returns the normed numbers, in the shape and type of x."""
        normed = [F.rms_norm(block, block.shape[-1:], eps=EPS) for block in x.split(BLOCK, -1)]
        return normed[0] if len(normed) == 1 else torch.cat(normed, -1)
