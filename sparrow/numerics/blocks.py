"""Numbers to codes and scales, and back.

Blocks run along one axis, which is the last one here: the others come before it. The last block of
a row may be short.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from sparrow.numerics.bits import exponents, pack, power, unpack
from sparrow.numerics.formats import NAN_SCALE, Format
from sparrow.numerics.rounding import Rounding

LEAST = -127  # the exponent of the least scale
LEAST_SCALE = 2.0**-126  # of those in fp32: smaller ones would lose bits


class Packed(NamedTuple):
    """Numbers as they are stored. The axis of the blocks is the last one, whichever it was before.

    codes: uint8 [..., bytes], see `bits.pack`. scales: uint8 exponents + 127 or float32, [...,
    blocks]; None without. shifts: uint8 [..., bytes], those of each row packed; None without.
    """

    codes: Tensor
    scales: Tensor | None
    shifts: Tensor | None


def rounded(
    x: Tensor,
    format: Format,
    axis: int = -1,
    rounding: Rounding = "nearest",
    noise: Tensor | None = None,
) -> Tensor:
    """Returns the values that x has in a format, float32 in the shape of x; decode(encode(x)), but
    for packing.

    A block with a number that is not finite is NaN throughout.

    Args:
        x: float32 or bfloat16, any shape of at least one dimension.
        format: see `Format`.
        axis: along which the blocks run.
        rounding: "nearest" (ties to even), "zero" (toward zero) or "stochastic". The mean of the
            last is the number itself only where nothing is cut off: not with powers of two by
            "floor".
        noise: for "stochastic": int64 in the shape of x, see `rounding.noise`.
    """
    codes, scales, shifts = _encoded(x, format, axis, rounding, noise)
    return _decoded(codes, scales, shifts, format).view(x.movedim(axis, -1).shape).movedim(-1, axis)


def encode(
    x: Tensor,
    format: Format,
    axis: int = -1,
    rounding: Rounding = "nearest",
    noise: Tensor | None = None,
) -> Packed:
    """Returns x in a format, packed. The arguments are those of `rounded`."""
    codes, scales, shifts = _encoded(x, format, axis, rounding, noise)
    *leading, length = x.movedim(axis, -1).shape
    packed = pack(codes.view(*leading, length), format.element.bits)
    if scales is not None and format.block != "tensor":
        scales = scales.view(*leading, scales.shape[-1])
    if shifts is not None:
        shifts = pack(shifts.view(*leading, shifts.shape[-1]), format.shift_bits)
    return Packed(packed, scales, shifts)


def decode(packed: Packed, format: Format, length: int, axis: int = -1) -> Tensor:
    """Returns the values, float32.

    Args:
        packed: see `encode`.
        format: that of `encode`.
        length: how many numbers there are along the axis.
        axis: where they go.
    """
    shape = (*packed.codes.shape[:-1], length)
    codes = _flat(unpack(packed.codes, format.element.bits, length), format)
    scales = packed.scales
    shifts = packed.shifts
    if scales is not None:
        scales = scales.reshape(len(codes), scales.shape[-1])
    if shifts is not None:
        pairs = -(-length // format.pair)
        shifts = unpack(shifts, format.shift_bits, pairs).view(len(codes), pairs)
    return _decoded(codes, scales, shifts, format).view(shape).movedim(-1, axis)


def _flat(rows: Tensor, format: Format) -> Tensor:
    """Returns rows whose blocks begin at their first number, [M, N]."""
    if format.block == "tensor":
        return rows.reshape(1, -1)
    return rows.reshape(rows.shape[:-1].numel(), rows.shape[-1])


def _encoded(
    x: Tensor, format: Format, axis: int, rounding: Rounding, noise: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Returns codes [M, N], scales [M, blocks] and shifts [M, pairs] as `Packed` has them, but for
    packing.
    """
    element = format.element
    x_MN = _flat(x.movedim(axis, -1), format).float()
    noise_MN = None if noise is None else _flat(noise.movedim(axis, -1), format)
    if format.block is None:
        return element.codes(x_MN, rounding, noise_MN, saturate=False), None, None
    block = format.block if isinstance(format.block, int) else max(1, x_MN.shape[1])
    most_MK = _largest(x_MN, block)
    is_finite_MK = most_MK.isfinite()
    shifts = None
    if format.scale == "fp32":
        # by a number torch may take its reciprocal
        scales = most_MK / torch.full_like(most_MK, element.largest)
        scales = torch.where(most_MK == 0, 1.0, scales.clamp(min=LEAST_SCALE))
        y_MN = x_MN / _spread(scales, block, x_MN)
        scales = torch.where(is_finite_MK, scales, torch.nan)
    else:
        exponent = _fitting(most_MK, format)
        scales = torch.where(is_finite_MK, exponent - LEAST, NAN_SCALE).to(torch.uint8)
        exponent = _spread(exponent, block, x_MN)
        if format.shift_bits:
            pairs = _fitting(_largest(x_MN, format.pair), format)
            shifts = (exponent[:, :: format.pair] - pairs).clamp(max=(1 << format.shift_bits) - 1)
            exponent = exponent - _spread(shifts, format.pair, x_MN)
        y_MN = x_MN * power(-exponent)
    is_finite_MN = _spread(is_finite_MK, block, x_MN)
    if shifts is not None:
        shifts = torch.where(is_finite_MN[:, :: format.pair], shifts, 0)
    codes = element.codes(torch.where(is_finite_MN, y_MN, 0.0), rounding, noise_MN)
    return codes, scales, shifts


def _decoded(
    codes_MN: Tensor, scales: Tensor | None, shifts: Tensor | None, format: Format
) -> Tensor:
    numbers_MN = format.element.numbers().to(codes_MN.device)[codes_MN]
    if scales is None or format.block is None:
        return numbers_MN
    block = format.block if isinstance(format.block, int) else max(1, codes_MN.shape[1])
    scale_MN = _spread(scales, block, codes_MN)
    if format.scale == "fp32":
        return numbers_MN * scale_MN
    exponent_MN = scale_MN.int() + LEAST
    if shifts is not None:
        exponent_MN = exponent_MN - _spread(shifts, format.pair, codes_MN)
    values_MN = numbers_MN * power(exponent_MN.clamp(max=-LEAST))
    return torch.where(scale_MN == NAN_SCALE, torch.nan, values_MN)


def _fitting(most: Tensor, format: Format) -> Tensor:
    """Returns the exponents of scales for numbers whose largest magnitude is `most`, int32."""
    element = format.element
    # under a larger one, decoded numbers would be infinite
    largest = -LEAST - element.largest_exponent
    exponent = (exponents(most) - element.largest_exponent).clamp(LEAST, largest)
    if format.rule == "floor":
        return exponent
    return (exponent + (most > element.largest * power(exponent)).int()).clamp(max=largest)


def _largest(x_MN: Tensor, block: int) -> Tensor:
    """Returns the largest magnitude of each block [M, blocks], NaN if one of its numbers is."""
    blocks = -(-x_MN.shape[1] // block)
    return pad(x_MN.abs(), (0, -x_MN.shape[1] % block)).view(len(x_MN), blocks, block).amax(2)


def _spread(values_MK: Tensor, block: int, like_MN: Tensor) -> Tensor:
    """Returns what blocks have for each of their numbers, [M, N]."""
    return values_MK.repeat_interleave(block, 1)[:, : like_MN.shape[1]]
