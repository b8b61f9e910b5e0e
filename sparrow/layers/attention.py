from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from sparrow.layers.site import Matmul


class Attention(nn.Module):
    """softmax(query key^T scale) value, whose two products are sites. Only recipes of their own change them.

    On a GPU it is computed with plain products. Torch's fused kernels add parts of a gradient in the order in which
    threads arrive, so a resumed run would end in other bits. What they save is memory of length x length, which is
    little for lists of some dozen ids.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scores = Matmul(high=True)
        self.mixed = Matmul(high=True)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        causal: bool = False,
        scale: float | None = None,
        seen: Tensor | None = None,
    ) -> Tensor:
        """Returns [..., length, D].

        Args:
            query, key, value: [..., length, D].
            causal: whether no position sees a later one.
            scale: by default D**-0.5.
            seen: bool, which positions [length, length] each one sees, instead of `causal`. It may have leading dims.
        """
        if self.scores.way is None and self.mixed.way is None:
            with sdpa_kernel(SDPBackend.MATH) if query.is_cuda else nullcontext():
                return F.scaled_dot_product_attention(query, key, value, attn_mask=seen, is_causal=causal, scale=scale)
        scores = self.scores(query, key.mT).float() * (query.shape[-1] ** -0.5 if scale is None else scale)
        if causal:
            seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if seen is not None:
            scores = scores.masked_fill(~seen, -torch.inf)
        return self.mixed(scores.softmax(-1).to(value.dtype), value)
