"""A weight that does not train, in the layout that products with it want, in fp32 on a CPU."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

LEAST = 1 << 20  # multiply-adds from which oneDNN wins: its calls take 8 us longer
ROWS = 128  # of a product that the layout is chosen for; others may have more or fewer


class PackedWeight:
    """x W^T + b, and perhaps a ReLU, for one W.

    Large products go to oneDNN, which gets the weight in its own layout. Torch's `mm` calls MKL,
    which takes 2.3 times as long on an AMD processor with AVX-512.

    weight: W [out, in], fp32.
    """

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self._least_rows = math.inf
        if torch.backends.mkldnn.is_available():
            self._least_rows = LEAST / max(weight.numel(), 1)
        self._packed: Tensor | None = None

    def __call__(self, x: Tensor, bias: Tensor | None, *, relu: bool) -> Tensor:
        """Returns [B, out], new. x: [B, in]. bias: b [out]."""
        if x.shape[0] >= self._least_rows:
            if self._packed is None:
                self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight, ROWS)
            kind = "relu" if relu else "none"
            out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, kind, [], "")
            return out
        if x.shape[0] == 1:  # a product with a vector reads the weight once, and twice as fast
            row = x[0]
            y = torch.mv(self.weight, row) if bias is None else torch.addmv(bias, self.weight, row)
            y = y[None]
        else:
            y = F.linear(x, self.weight, bias)
        return y.relu_() if relu else y
