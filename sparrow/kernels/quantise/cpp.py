"""The compiled operator with the signatures of the reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparrow.kernels import missing
from sparrow.numerics.blocks import Packed
from sparrow.numerics.formats import Format
from sparrow.numerics.rounding import Rounding

if TYPE_CHECKING:
    from sparrow.kernels.quantise import Draw

assert not missing(), "`resolve` comes first"
ops = torch.ops.sparrow
ROUNDINGS = ("nearest", "zero", "stochastic")
LANES = 16  # of a vector
WHOLE = {"row": 0, "tensor": -1}


def rounded(
    x: Tensor, format: Format, axis: int, how: Rounding, draw: Draw, dtype: torch.dtype
) -> Tensor:
    """See the package."""
    out: Tensor = ops.quantise_values.default(
        *_arguments(x, format, axis, how, draw), dtype == torch.bfloat16
    )
    return out.view(x.shape)


def encode(x: Tensor, format: Format, axis: int, how: Rounding, draw: Draw) -> Packed:
    """See the package."""
    codes, scales, shifts = ops.quantise_codes.default(*_arguments(x, format, axis, how, draw))
    sizes = [size for at, size in enumerate(x.shape) if at != axis % x.dim()]
    if format.block != "tensor":
        scales = scales.view(*sizes, scales.shape[1])
    shifts = shifts.view(*sizes, shifts.shape[1]) if format.shift_bits else None
    return Packed(codes.view(*sizes, codes.shape[1]), scales, shifts)


def decode(packed: Packed, format: Format, length: int) -> Tensor:
    """See the package."""
    assert packed.scales is not None and isinstance(format.block, int)
    rows = packed.codes.shape[:-1]
    codes, scales = (
        part.reshape(rows.numel(), part.shape[-1]) for part in (packed.codes, packed.scales)
    )
    element = format.element
    numbers = element.numbers()
    out: Tensor = ops.quantise_decode.default(
        codes, scales, numbers, length, format.block, element.bits
    )
    return out.view(*rows, length)


def decodes(format: Format) -> bool:
    """Returns whether the compiled operator can decode a format; else the reference does."""
    fits = isinstance(format.block, int) and format.block % 8 == 0 and format.element.bits <= 8
    return fits and format.scale == "power" and not format.shift_bits


def covers(x: Tensor, format: Format, axis: int, how: Rounding, packed: bool) -> bool:
    """Returns whether the compiled operator can do this; else the reference does."""
    block, pair, element = format.block, format.pair, format.element
    if (
        block is None
        or element.mantissa_bits > 10
        or x.dtype not in (torch.float32, torch.bfloat16)
    ):
        return False  # without a scale a cast is torch's
    axis %= x.dim()
    if (
        how == "stochastic"
        and axis < x.dim() - 1
        and (packed or axis < x.dim() - 2 or x.shape[-1] == 1)
    ):
        return False  # the columns of the random numbers are not side by side there
    if isinstance(block, int) and block < LANES:
        return False
    if format.shift_bits and (pair > LANES or pair & pair - 1):
        return False
    if not packed:
        return True
    bits = block // pair * format.shift_bits if isinstance(block, int) else 0
    bytes_wholly = block in WHOLE or (isinstance(block, int) and block % 8 == 0)
    shifts_wholly = bits == 0 or (bits % 8 == 0 and bits <= 64)
    return element.bits <= 8 and bytes_wholly and shifts_wholly


def _arguments(
    x: Tensor, format: Format, axis: int, how: Rounding, draw: Draw
) -> tuple[Tensor, Sequence[int], Sequence[int], float, int, int, int]:
    axis %= x.dim()
    shape = [x.shape[:axis].numel(), x.shape[axis], x.shape[axis + 1 :].numel()]
    element = format.element
    block = format.block if isinstance(format.block, int) else WHOLE[format.block or "row"]
    numbers = [
        element.mantissa_bits,
        element.least_exponent,
        element.bits,
        element.largest_exponent,
        element.largest_code,
        int(element.twos_complement),
        block,
        format.pair,
        format.shift_bits,
        int(format.rule == "ceil"),
        int(format.scale == "fp32"),
    ]
    key = draw.key - (1 << 64) if draw.key >> 63 else draw.key
    return x.contiguous(), shape, numbers, element.largest, ROUNDINGS.index(how), key, draw.number


@torch.library.register_fake("sparrow::quantise_values")
def _(x, shape, format, largest, rounding, key, number, to_bf16):  # type: ignore[no-untyped-def]
    return x.new_empty(shape, dtype=torch.bfloat16 if to_bf16 else torch.float32)
