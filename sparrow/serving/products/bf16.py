"""Weights, inputs and the rounded sums are bfloat16, as in a run with precision bf16."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sparrow.layers.precisions.bf16 import lacks_bf16
from sparrow.serving.products import Range, join_inputs


def encode(weight_OI: Tensor, inputs: Range | None) -> dict[str, Tensor]:
    """Encode a weight. The only field is weight [out, in]."""
    return {"weight": weight_OI.bfloat16()}


def is_native() -> bool:
    """Returns whether this processor has units for bfloat16."""
    return not lacks_bf16(torch.device("cpu"))


class Product:
    """Multiplies by a bfloat16 weight. Without units for bfloat16, float32 gives nearly the same
    sums, but slower.
    """

    def __init__(self, fields: Mapping[str, Tensor]) -> None:
        self._weight_IO = fields["weight"].t()
        if not is_native():
            self._weight_IO = self._weight_IO.float()

    def __call__(self, parts: Sequence[Tensor], bias: Tensor | None, relu: bool) -> Tensor:
        """Returns the product, as `Instead` describes it."""
        x = join_inputs(parts).bfloat16().to(self._weight_IO.dtype)
        y = (x @ self._weight_IO).bfloat16().float()
        y = y if bias is None else y + bias
        return y.relu_() if relu else y
