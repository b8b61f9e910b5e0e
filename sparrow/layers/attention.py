from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from sparrow.layers.site import Matmul, Watch
from sparrow.layers.watch import some


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
        shares = partial(_shares, dim=query.shape[-1], causal=causal, scale=scale)
        if self.scores.way is None and self.mixed.way is None:
            with sdpa_kernel(SDPBackend.MATH) if query.is_cuda else nullcontext():
                out = F.scaled_dot_product_attention(query, key, value, attn_mask=seen, is_causal=causal, scale=scale)
            of_scores, of_mixed = self.scores.watch, self.mixed.watch
            if of_scores is not None and of_mixed is not None and out.requires_grad:
                out.register_hook(partial(_tell, (of_scores, of_mixed), (query, key, value), shares, seen))
            return out
        return self.mixed(shares(self.scores(query, key.mT), seen=seen).to(value.dtype), value)


def _shares(scores: Tensor, *, dim: int, causal: bool, scale: float | None, seen: Tensor | None) -> Tensor:
    """Returns the softmax of query key^T, fp32. dim: of a query."""
    scores = scores.float() * (dim**-0.5 if scale is None else scale)
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if seen is not None:
        scores = scores.masked_fill(~seen, -torch.inf)
    return scores.softmax(-1)


def _tell(
    watches: tuple[Watch, Watch],
    inputs: tuple[Tensor, Tensor, Tensor],
    shares: Callable[..., Tensor],
    seen: Tensor | None,
    grad: Tensor,
) -> None:
    """Tell those who watch of some examples of both products.

    These are computed again, because torch computed both products together.
    """
    of_scores, of_mixed = watches
    most, rows = of_scores.most, grad.shape[:-1].numel()
    if seen is not None:
        seen = some(seen.expand(*inputs[0].shape[:-1], inputs[1].shape[-2]), most)
    q, k, v, dy = (some(x, most).float() for x in (*inputs, grad))
    with torch.enable_grad():
        scores = (q @ k.mT).requires_grad_()
        mixing = shares(scores, seen=seen)
        (flowing,) = torch.autograd.grad(mixing, scores, dy @ v.mT)
    of_mixed.told(mixing.detach(), v.mT, dy, rows)
    of_scores.told(q, k, flowing, rows)
