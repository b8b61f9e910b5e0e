from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from sparrow.layers.rows import sample_rows
from sparrow.layers.site import Matmul, Watch


class Attention(nn.Module):
    """softmax(query key^T scale) value, whose two products are sites. Only recipes of their own
    change them.

    On a GPU it is computed with plain products. Torch's fused kernels add parts of a gradient in
    the order in which threads arrive, so a resumed run would end in other bits. What they save is
    memory of length x length, which is little for lists of some dozen ids.
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
        mask: Tensor | None = None,
    ) -> Tensor:
        """Returns [..., length, D].

        Args:
            query, key, value: [..., length, D].
            causal: whether no position sees a later one.
            scale: by default D**-0.5.
            mask: bool, which positions [length, length] each one sees, instead of `causal`. It may
                have leading dims.
        """
        shares = partial(_shares, dim=query.shape[-1], causal=causal, scale=scale)
        if self.scores.way is None and self.mixed.way is None:
            with sdpa_kernel(SDPBackend.MATH) if query.is_cuda else nullcontext():
                out = F.scaled_dot_product_attention(
                    query, key, value, attn_mask=mask, is_causal=causal, scale=scale
                )
            scores_watch = self.scores.watch
            mixed_watch = self.mixed.watch
            if scores_watch is not None and mixed_watch is not None and out.requires_grad:
                watches = (scores_watch, mixed_watch)
                inputs = (query, key, value)
                out.register_hook(partial(_tell_watches, watches, inputs, shares, mask))
            return out
        return self.mixed(shares(self.scores(query, key.mT), mask=mask).to(value.dtype), value)


def _shares(
    scores: Tensor, *, dim: int, causal: bool, scale: float | None, mask: Tensor | None
) -> Tensor:
    """Returns the softmax of query key^T, fp32. dim: of a query."""
    scores = scores.float() * (dim**-0.5 if scale is None else scale)
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return scores.softmax(-1)


def _tell_watches(
    watches: tuple[Watch, Watch],
    inputs: tuple[Tensor, Tensor, Tensor],
    shares: Callable[..., Tensor],
    mask: Tensor | None,
    grad: Tensor,
) -> None:
    """Tell those who watch of some examples of both products.

    These are computed again, because torch computed both products together.
    """
    scores_watch, mixed_watch = watches
    most = scores_watch.most
    rows = grad.shape[:-1].numel()
    if mask is not None:
        mask = sample_rows(mask.expand(*inputs[0].shape[:-1], inputs[1].shape[-2]), most)
    q, k, v, dy = (sample_rows(x, most).float() for x in (*inputs, grad))
    with torch.enable_grad():
        scores = (q @ k.mT).requires_grad_()
        mixing = shares(scores, mask=mask)
        (flowing,) = torch.autograd.grad(mixing, scores, dy @ v.mT)
    mixed_watch.tell(mixing.detach(), v.mT, dy, rows)
    scores_watch.tell(q, k, flowing, rows)
