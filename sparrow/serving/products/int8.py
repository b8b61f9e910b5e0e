"""Weights are signed bytes with a scale for each output channel, inputs unsigned bytes of a
calibrated range.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sparrow.core.plain import plain
from sparrow.core.repeated import Columns, Repeated
from sparrow.kernels.int8_linear import (
    Packed,
    Shared,
    Static,
    Weight,
    linear,
    packed,
    quantised,
    sums,
)
from sparrow.serving.products import Range, join_inputs

KEPT = 8  # forms of a weight: a service is asked with few sets of users' columns
LEAST = 1 << 24  # multiply-adds that take as long as it takes to find what is shared
COPYING = 200  # multiply-adds that take as long as copying a number of a column


def encode(weight_OI: Tensor, inputs: Range | None) -> dict[str, Tensor]:
    """Encode a weight. The fields are codes int8 [out, in], scale [out], and scale and zero of the
    inputs.

    Without a range of inputs each row has its own, and there is no third field.
    """
    codes_OI, scale_O = quantised(weight_OI)
    static = None if inputs is None else Static.of(*inputs)
    inputs_2 = {} if static is None else {"inputs": torch.tensor([static.scale, static.zero])}
    return {"codes": codes_OI, "scale": scale_O, **inputs_2}


def is_native() -> bool:
    """Returns True. Every processor has instructions for products of bytes, some of two steps."""
    return True


class Product:
    """Multiplies by a weight of bytes. What a user's candidates share is summed once, exactly: in
    whole numbers.
    """

    def __init__(self, fields: Mapping[str, Tensor]) -> None:
        self._weight = Weight(fields["codes"], fields["scale"])
        scale, zero = fields["inputs"].tolist() if "inputs" in fields else (0.0, 0.0)
        self._static = Static(scale=scale, zero=int(zero)) if "inputs" in fields else None
        self._packed: dict[bytes, list[Packed]] = {}  # by the marks of the columns that are shared

    def __call__(self, parts: Sequence[Tensor], bias: Tensor | None, relu: bool) -> Tensor:
        """Returns the product, as `Instead` describes it."""
        x = join_inputs(parts)
        weight = self._ready(b"", bias)[0]
        if not (isinstance(x, Repeated) and x.gains(len(self._weight.scale_O), LEAST, COPYING)):
            return linear(plain(x), weight, self._static, relu=relu)
        shared_US, own_BO = x.halves()
        if not own_BO.shape[1]:
            return Repeated.spread(linear(shared_US, weight, self._static, relu=relu), x.users)
        if self._static is None:  # a row's scale is that of all its columns
            return linear(plain(x), weight, None, relu=relu)
        shared_weight, own_weight = self._ready(x.key(), bias)
        shared = Shared(sums(shared_US, shared_weight, self._static), x.users.inverse_B)
        return linear(own_BO, own_weight, self._static, relu=relu, shared=shared)

    def _ready(self, key: bytes, bias: Tensor | None) -> list[Packed]:
        """Returns the weight, or that of the columns that are shared and that of the others."""
        forms = self._packed.get(key)
        if forms is None:
            weights = (
                [self._weight.columns(at) for at in Columns.of(key)] if key else [self._weight]
            )
            forms = [packed(weight, bias) for weight in weights]
            if len(self._packed) >= KEPT:
                self._packed.clear()
            self._packed[key] = forms
        return forms
