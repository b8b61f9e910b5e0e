"""A table of the number formats."""

from __future__ import annotations

import math

import torch

from sparrow.kernels.quantise import rounded
from sparrow.numerics.errors import qsnr
from sparrow.numerics.formats import FORMATS, Format

HEADER = ("format", "scale", "bits", "least number", "largest number", "QSNR, dB", "bound, dB")
ROWS, COLUMNS = 500, 1024  # of numbers that are rounded


def rows() -> list[list[str]]:
    """Returns a line for each format, as HEADER names them. Ranges are those of elements, before a
    scale.
    """
    random = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, COLUMNS, generator=random) * torch.randn(ROWS, 1, generator=random).abs()
    lines = []
    for name, format in FORMATS.items():
        element = format.element
        least = bound(format)
        lines.append([
            name, _scale(format), f"{format.bits:g}",
            f"{element.least:.3g}", f"{element.largest:.6g}", f"{qsnr(x, rounded(x, format)):.1f}",
            "" if least is None else f"{least:.2f}",
        ])  # fmt: skip
    return lines


def bound(format: Format) -> float | None:
    """Returns the least QSNR that any numbers have in a format of blocks of whole numbers, in
    decibels, else None.

    6.02 m + 10 log10(s / (k1 + (s - 1) k2)), s = 4^(2^d2 - 1) (arXiv 2302.08007, theorem 1).
    """
    element = format.element
    if not isinstance(format.block, int) or element.exponent_bits != 1 or format.scale != "power":
        return None
    finer = 4.0 ** ((1 << format.shift_bits) - 1)
    bits = element.mantissa_bits + 1
    return 20 * math.log10(2) * bits + 10 * math.log10(
        finer / (format.block + (finer - 1) * format.pair)
    )


def _scale(format: Format) -> str:
    if format.block is None:
        return "none"
    group = (
        "the tensor"
        if format.block == "tensor"
        else "a row"
        if format.block == "row"
        else f"{format.block} numbers"
    )
    shift = f", shift of {format.pair}" if format.shift_bits else ""
    return f"{'fp32' if format.scale == 'fp32' else '2^k'} of {group}{shift}"
