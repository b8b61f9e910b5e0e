"""Numbers in a format of `sparrow.numerics`: rounded values, or packed codes and scales. impl: see
`sparrow.kernels`.

Every implementation gives the same bits, on every processor and with any number of threads. There
is no gradient here: a layer that rounds its operands lets gradients pass straight through.
"""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from sparrow.core.errors import UserError
from sparrow.kernels import Impl, Operator
from sparrow.numerics.blocks import Packed
from sparrow.numerics.formats import Format
from sparrow.numerics.rounding import Rounding

_operator = Operator(__name__)


class Draw(NamedTuple):
    """Which random numbers stochastic rounding takes: those of `numerics.rounding.noise` for these
    two.

    A number's row and column are those of x as a matrix, whose columns are its last dimension.
    """

    key: int = 0  # of seed and tensor, 64 bits
    number: int = 0  # of the step


FIRST = Draw()


def rounded(
    x: Tensor,
    format: Format,
    axis: int = -1,
    how: Rounding = "nearest",
    *,
    draw: Draw = FIRST,
    dtype: torch.dtype = torch.float32,
    impl: Impl = "auto",
) -> Tensor:
    """Returns the values that x has in a format, in the shape of x. A block that is not finite is
    NaN throughout.

    Args:
        x: float32 or bfloat16, of at least one dimension.
        format: see `Format`.
        axis: along which its blocks run.
        how: "nearest" (ties to even), "zero" (toward zero) or "stochastic".
        draw: for "stochastic".
        dtype: float32, or bfloat16 where `format.is_exact_in_bf16`.
        impl: see `sparrow.kernels`. Formats that the compiled operator lacks run on the reference;
            see `cpp.covers`.

    Raises:
        UserError: when a type does not fit.
    """
    _check(x)
    if dtype not in (torch.float32, torch.bfloat16) or (
        dtype == torch.bfloat16 and not format.is_exact_in_bf16
    ):
        raise UserError(f"dtype: {dtype} cannot hold the values of this format; use torch.float32")
    out: Tensor = _implementation(x, format, axis, how, False, impl).rounded(
        x, format, axis, how, draw, dtype
    )
    return out


def encode(
    x: Tensor,
    format: Format,
    axis: int = -1,
    how: Rounding = "nearest",
    *,
    draw: Draw = FIRST,
    impl: Impl = "auto",
) -> Packed:
    """Returns x in a format, packed; see `numerics.Packed`, and `decode` for the way back.

    The arguments are those of `rounded`.

    Raises:
        UserError: when a type does not fit.
    """
    _check(x)
    packed: Packed = _implementation(x, format, axis, how, True, impl).encode(
        x, format, axis, how, draw
    )
    return packed


def decode(packed: Packed, format: Format, length: int, *, impl: Impl = "auto") -> Tensor:
    """Returns the values of what `encode` packed along the last axis, float32 [..., length].

    Args:
        packed: see there. Rows of codes, and of scales, may lie apart.
        format: that of `encode`.
        length: how many numbers a row has.
        impl: see `sparrow.kernels`. Formats that the compiled operator lacks run on the reference.
    """
    implementation = _operator.choose(impl, packed.codes.device)
    if not implementation.decodes(format):
        implementation = _operator.load("reference")
    values: Tensor = implementation.decode(packed, format, length)
    return values


def _implementation(
    x: Tensor, format: Format, axis: int, how: Rounding, packed: bool, impl: Impl
) -> ModuleType:
    implementation = _operator.choose(impl, x.device)
    return (
        implementation
        if implementation.covers(x, format, axis, how, packed)
        else _operator.load("reference")
    )


def _check(x: Tensor) -> None:
    if x.dtype not in (torch.float32, torch.bfloat16) or x.dim() == 0:
        raise UserError(
            f"x: {x.dtype} with {x.dim()} dimensions; expected float32 or bfloat16 with at"
            " least one"
        )


__all__ = ["Draw", "decode", "encode", "rounded"]
