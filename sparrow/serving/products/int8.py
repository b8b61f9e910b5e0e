"""Weights are signed bytes with a scale for each output channel, inputs unsigned bytes of a calibrated range."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sparrow.kernels.int8_linear import Packed, Static, Weight, linear, packed, quantised
from sparrow.serving.products import Range, joined


def encoded(weight_OI: Tensor, inputs: Range | None) -> dict[str, Tensor]:
    """See `ProductFormat.encoded`. Its fields are codes int8 [out, in], scale [out], and scale and zero of the inputs.

    Without a range of inputs each row has its own, and there is no third field.
    """
    codes_OI, scale_O = quantised(weight_OI)
    static = None if inputs is None else Static.of(*inputs)
    inputs_2 = {} if static is None else {"inputs": torch.tensor([static.scale, static.zero])}
    return {"codes": codes_OI, "scale": scale_O, **inputs_2}


def is_native() -> bool:
    """See `ProductFormat.is_native`. Every processor has instructions for products of bytes, some of two steps."""
    return True


class Product:
    """See `ProductFormat.Product`."""

    def __init__(self, fields: Mapping[str, Tensor]) -> None:
        self._weight = Weight(fields["codes"], fields["scale"])
        scale, zero = fields["inputs"].tolist() if "inputs" in fields else (0.0, 0.0)
        self._static = Static(scale=scale, zero=int(zero)) if "inputs" in fields else None
        self._packed: Packed | None = None

    def __call__(self, parts: Sequence[Tensor], bias: Tensor | None, relu: bool) -> Tensor:
        """See `Instead`."""
        if self._packed is None:
            self._packed = packed(self._weight, bias)
        return linear(joined(parts), self._packed, self._static, relu=relu)
