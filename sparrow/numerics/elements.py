"""Elements: which numbers a code of a few bits can be."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sparrow.numerics.bits import exponents, power
from sparrow.numerics.rounding import Rounding, to_whole


@dataclass(frozen=True, kw_only=True)
class Element:
    """A floating-point format: sign, exponent, mantissa.

    Numbers below 2**least_exponent are spaced evenly (subnormal). Whole numbers are the case of a
    single bit of exponent: all are spaced evenly then.

    Args:
        name: in lower case.
        exponent_bits, mantissa_bits: their numbers of bits, beside one of sign. mantissa_bits does
            not count the leading one, which is not stored.
        bias: what the stored exponent is above the exponent.
        largest: the largest finite number. A code after it is infinite if its mantissa is 0, else
            it is not a number.
        twos_complement: how negative codes are written; else the sign is the highest bit.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    largest: float
    twos_complement: bool = False

    @property
    def bits(self) -> int:
        """How many bits a code has."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def least_exponent(self) -> int:
        """Of the numbers that have all bits of mantissa."""
        return 1 - self.bias

    @property
    def least(self) -> float:
        """The least positive number."""
        return 2.0 ** (self.least_exponent - self.mantissa_bits)

    @property
    def largest_exponent(self) -> int:
        """Of the largest number."""
        return math.frexp(self.largest)[1] - 1

    @property
    def largest_code(self) -> int:
        """Of the largest number."""
        steps = math.ldexp(self.largest, self.mantissa_bits - self.largest_exponent)
        return (self.largest_exponent - self.least_exponent << self.mantissa_bits) + int(steps)

    @property
    def nan_code(self) -> int | None:
        """A code that is not a number; None if all codes are numbers."""
        last = (1 << self.bits - 1) - 1
        return last if last > self.largest_code else None

    def codes(
        self, x: Tensor, rounding: Rounding, noise: Tensor | None = None, saturate: bool = True
    ) -> Tensor:
        """Returns the code of each number, int32.

        Args:
            x: float32.
            rounding: "nearest" (ties to even), "zero" (toward zero) or "stochastic".
            noise: for "stochastic": random whole numbers of 32 bits, int64, see `rounding.noise`.
            saturate: whether numbers beyond the largest become it. Else they become the code after
                it when they are rounded to nearest, and infinities in any case. Needs a NaN in the
                element.
        """
        exponent = exponents(x).clamp(min=self.least_exponent)
        steps = x.abs() * power(-exponent) * 2.0**self.mantissa_bits  # exact
        if rounding == "nearest":
            steps = steps.round()
        elif rounding == "zero":
            steps = steps.floor()
        else:
            assert noise is not None, "stochastic rounding takes noise"
            steps = to_whole(steps, noise)
        codes = (exponent - self.least_exponent << self.mantissa_bits) + steps.int()
        if saturate:
            codes = codes.clamp(max=self.largest_code)
        else:
            assert self.nan_code is not None, f"{self.name} cannot say that a number is not one"
            codes = codes.clamp(max=self.largest_code + (rounding == "nearest"))
            codes = torch.where(x.isinf(), self.largest_code + 1, codes)
            codes = torch.where(x.isnan(), self.nan_code, codes)
        if self.twos_complement:
            return torch.where(x.signbit(), -codes, codes) & (1 << self.bits) - 1
        return codes | x.signbit().int() << self.bits - 1

    def numbers(self) -> Tensor:
        """Returns the number of each code, float32 [2**bits]."""
        return _numbers(self)


@functools.cache
def _numbers(element: Element) -> Tensor:
    codes = torch.arange(1 << element.bits)
    sign = 1 << element.bits - 1
    size = codes & sign - 1
    if element.twos_complement:
        size = torch.where(codes < sign, codes, 2 * sign - codes)
    exponent = size >> element.mantissa_bits
    mantissa = size & (1 << element.mantissa_bits) - 1
    steps = torch.where(exponent > 0, mantissa + (1 << element.mantissa_bits), mantissa).double()
    numbers = (
        steps
        * 2.0
        ** (exponent.clamp(min=1) - 1 + element.least_exponent - element.mantissa_bits).double()
    )
    if not element.twos_complement:
        beyond = torch.where(mantissa == 0, torch.inf, torch.nan)
        first = element.largest_code + 1
        numbers = torch.where(
            size > element.largest_code, torch.where(size == first, beyond, torch.nan), numbers
        )
    return torch.where(codes < sign, numbers, -numbers).float()


def whole(bits: int) -> Element:
    """Returns the whole numbers of a sign and `bits` more, divided by 2**(bits - 1): the elements
    of BDR formats.
    """
    return Element(
        name=f"whole{bits}",
        exponent_bits=1,
        mantissa_bits=bits - 1,
        bias=1,
        largest=2 - 2.0 ** (1 - bits),
    )


def _element(
    name: str, exponent_bits: int, mantissa_bits: int, bias: int, largest: float
) -> Element:
    return Element(
        name=name,
        exponent_bits=exponent_bits,
        mantissa_bits=mantissa_bits,
        bias=bias,
        largest=largest,
        twos_complement=name == "int8",
    )


_ROWS = [  # name, bits of exponent and of mantissa, bias, largest
    _element("bf16", 8, 7, 127, 255 * 2.0**120),
    _element("fp16", 5, 10, 15, 65504.0),
    _element("e5m2", 5, 2, 15, 57344.0),
    _element("e4m3", 4, 3, 7, 448.0),
    _element("e3m2", 3, 2, 3, 28.0),
    _element("e2m3", 2, 3, 1, 7.5),
    _element("e2m1", 2, 1, 1, 6.0),
    _element("int8", 1, 6, 1, 127 / 64),  # the whole numbers from -127 to 127, divided by 64
]
ELEMENTS = {element.name: element for element in _ROWS}
