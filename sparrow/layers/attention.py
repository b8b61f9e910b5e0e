from __future__ import annotations

from contextlib import nullcontext

from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    seen: Tensor | None = None,
) -> Tensor:
    """Returns softmax(query key^T scale) value, [..., length, D].

    On a GPU it is computed with plain products. Torch's fused kernels add parts of a gradient in the order in which
    threads arrive, so a resumed run would end in other bits. What they save is memory of length x length, which is
    little for lists of some dozen ids.

    Args:
        query, key, value: [..., length, D].
        causal: whether no position sees a later one.
        scale: by default D**-0.5.
        seen: bool, which positions [length, length] each one sees, instead of `causal`. It may have leading dims.
    """
    with sdpa_kernel(SDPBackend.MATH) if query.is_cuda else nullcontext():
        return F.scaled_dot_product_attention(query, key, value, attn_mask=seen, is_causal=causal, scale=scale)
