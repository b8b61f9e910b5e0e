"""Products of int8: y = x W^T + bias, with W in signed bytes and x in unsigned ones. For serving
only: no gradient.

Weights are symmetric with a scale for each output channel. Activations have a scale and a zero
point: static ones of a range that was calibrated, or dynamic ones of each row alone. Nothing
depends on the other rows of a batch. The sums are whole numbers, so that every implementation,
processor and number of threads gives the same bits (arXiv 2105.12676).

Where samples share a part of their columns, the sums of that part are taken once (`sums`) and added
to those of the rest (`Shared`). That is the same as the product of all columns, bit for bit. Shape
suffixes: I inputs, O output channels, U shared rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from sparrow.core.errors import UserError
from sparrow.kernels import Impl, Operator
from sparrow.kernels.int8_linear import reference

_operator = Operator(__name__)

MOST_INPUTS = 1 << 16  # the sums of more may not fit into 31 bits


@dataclass(frozen=True, kw_only=True)
class Static:
    """How the activations of a site become codes: round(x / scale) + zero, cut to 0 to 255.

    Args:
        scale: above 0; taken as float32.
        zero: the code of 0.0, 0 to 255.
    """

    scale: float
    zero: int

    def __post_init__(self) -> None:
        if not reference.LEAST_SCALE <= self.scale <= torch.finfo(torch.float32).max:
            raise UserError(
                f"scale: {self.scale} is not a positive float32; calibrate with finite activations"
            )
        if not 0 <= self.zero <= 255:
            raise UserError(f"zero: {self.zero} is not 0 to 255")

    @classmethod
    def of(cls, low: float, high: float) -> Static:
        """Returns that of numbers from `low` to `high`, widened so that they include 0.

        Raises:
            UserError: when one is not finite.
        """
        if not (math.isfinite(low) and math.isfinite(high)):
            raise UserError(
                f"range: {low} to {high} is not finite; calibrate with finite activations"
            )
        scale, zero = reference.scale_and_zero(
            torch.tensor(low).clamp(max=0), torch.tensor(high).clamp(min=0)
        )
        return cls(scale=scale.item(), zero=int(zero.item()))


class Weight(NamedTuple):
    """A weight in int8, as it is saved: codes_OI * scale_O. codes_OI: int8, -127 to 127. scale_O:
    float32.
    """

    codes_OI: Tensor
    scale_O: Tensor

    def columns(self, at: slice | Tensor) -> Weight:
        """Returns the weight of some inputs, with the same scales."""
        return Weight(self.codes_OI[:, at], self.scale_O)


class Shared(NamedTuple):
    """Sums of columns that samples share. sums_UO: of `sums`. index_B: int64, which of its rows
    each uses.
    """

    sums_UO: Tensor
    index_B: Tensor


class Packed(NamedTuple):
    """A weight and its bias as an implementation reads them; made by `packed`, never saved."""

    codes: Tensor
    sums_O: Tensor  # of the codes of a channel, int32
    channels_2O: Tensor  # scale and bias
    inputs: int
    outputs: int
    implementation: ModuleType


def quantised(weight_OI: Tensor) -> Weight:
    """Returns a weight in int8: symmetric, its largest number being 127. Rounds to nearest; a row
    of zeros stays one.

    Args:
        weight_OI: float32.

    Raises:
        UserError: when a number is not finite.
    """
    if not weight_OI.isfinite().all():
        raise UserError("weight: a number is not finite; nothing can be served with it")
    return Weight(*reference.quantised(weight_OI))


def packed(weight: Weight, bias_O: Tensor | None = None, *, impl: Impl = "auto") -> Packed:
    """Returns a weight as `linear` and `sums` want it. bias_O: float32; None is 0.

    Raises:
        UserError: when shapes do not fit, or the inputs are more than MOST_INPUTS.
    """
    codes_OI, scale_O = weight
    outputs, inputs = codes_OI.shape
    bias_O = torch.zeros_like(scale_O) if bias_O is None else bias_O.float()
    if inputs > MOST_INPUTS:
        raise UserError(
            f"weight: {inputs} inputs are more than {MOST_INPUTS}; keep this product in 16 or 32"
            " bits"
        )
    if codes_OI.dtype != torch.int8 or scale_O.shape != (outputs,) or bias_O.shape != (outputs,):
        raise UserError(f"weight: expected int8 [O, I], and scale and bias [{outputs}]")
    implementation = _operator.choose(impl, codes_OI.device)
    sums_O = codes_OI.sum(1, dtype=torch.int32)
    codes, sums_O, channels_2O = implementation.packed(
        codes_OI, sums_O, torch.stack([scale_O.float(), bias_O])
    )
    return Packed(codes, sums_O, channels_2O, inputs, outputs, implementation)


def linear(
    x_BI: Tensor,
    weight: Packed,
    static: Static | None = None,
    *,
    relu: bool = False,
    shared: Shared | None = None,
) -> Tensor:
    """Returns x W^T + bias, float32 [B, O].

    A row of x with a number that is not finite has NaN in all of its outputs. Other rows do not
    change.

    Args:
        x_BI: float32.
        weight: see `packed`.
        static: scale and zero point of x; None takes them from each row: its least and its largest
            number, and 0.
        relu: whether negative outputs become 0.
        shared: the sums of further columns, made with the same `static` and the same scales of the
            weight.

    Raises:
        ValueError: when dtypes or shapes do not fit, or an index is outside; UserError for `shared`
            without `static`.
    """
    if shared is not None and static is None:
        raise UserError(
            "shared: rows with scales of their own have no sums to share; give `static`"
        )
    out_BO: Tensor = weight.implementation.linear(x_BI, weight, static, relu, shared)
    return out_BO


def sums(x_BI: Tensor, weight: Packed, static: Static) -> Tensor:
    """Returns the sum over inputs of (code of x - zero) * code of the weight, int32 [B, O].

    All sums of a row of x with a number that is not finite are -2**31, which no other row has;
    `linear` makes NaN of them.

    Args:
        x_BI: float32.
        weight: see `packed`; its bias is not used.
        static: scale and zero point of x.

    Raises:
        ValueError: when dtypes or shapes do not fit.
    """
    out_BO: Tensor = weight.implementation.sums(x_BI, weight, static)
    return out_BO


__all__ = [
    "MOST_INPUTS",
    "Packed",
    "Shared",
    "Static",
    "Weight",
    "linear",
    "packed",
    "quantised",
    "sums",
]
