"""Formats: elements, and the scales that they share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sparrow.core.errors import UserError
from sparrow.numerics.elements import ELEMENTS, Element, whole

# d1 of a power of two: the exponent + 127; 255 says that the block is not a number (OCP's E8M0)
SCALE_BITS = 8
NAN_SCALE = (1 << SCALE_BITS) - 1


@dataclass(frozen=True, kw_only=True)
class Format:
    """How numbers are written down: element * scale / 2**shift.

    OCP's MX formats (arXiv 2310.10537) have a scale for each block and no shift. The formats of BDR
    (arXiv 2302.08007) have both: their k1 is `block`, d1 is 8, k2 is `pair`, d2 is `shift_bits`,
    and m is the element's bits but the sign.

    Args:
        element: which numbers a code can be.
        block: how many neighbours along an axis share a scale; "row" is all along the axis,
            "tensor" all there are. None: there is no scale.
        scale: "power" is a power of two, whose exponent is stored in a byte. "fp32" is the largest
            magnitude of the block divided by the largest number of the element.
        rule: of powers of two. "floor" aligns the exponents of the block's largest magnitude and of
            the element's largest number (OCP), which cuts up to an eighth (E4M3) or a quarter
            (E2M1) off that magnitude. "ceil" is the least power of two under which nothing is cut
            off.
        pair: how many neighbours share a shift.
        shift_bits: bits of a shift, which makes the numbers of a pair finer that are smaller than
            the block's.

    Raises:
        UserError: when the choices do not fit each other.
    """

    element: Element
    block: int | Literal["row", "tensor"] | None = None
    scale: Literal["power", "fp32"] = "power"
    rule: Literal["floor", "ceil"] = "floor"
    pair: int = 1
    shift_bits: int = 0

    def __post_init__(self) -> None:
        name = self.element.name
        if self.block is None and self.element.nan_code is None:
            raise UserError(
                f"element: {name} cannot say that a number is not one; give it a scale with `block`"
            )
        if self.block is not None and self.element.exponent_bits == SCALE_BITS:
            raise UserError(
                f"element: {name} has the range of fp32 and takes no scale; leave `block` out"
            )
        if isinstance(self.block, int) and self.block < 1:
            raise UserError(f"block: {self.block} numbers; give 1 at least")
        if not 0 <= self.shift_bits <= 3:
            raise UserError(f"shift_bits: {self.shift_bits} is not 0 to 3")
        if self.shift_bits and (
            not isinstance(self.block, int) or self.pair < 1 or self.block % self.pair
        ):
            raise UserError(
                f"pair: {self.pair} does not divide the block, {self.block}; shifts are within"
                " blocks"
            )
        if self.shift_bits and self.scale != "power":
            raise UserError("shift_bits: shifts go with scale = 'power'")

    def bytes_row(self, length: int) -> int:
        """Returns how many bytes so many numbers along the axis take; a scale of the whole tensor
        is not counted.
        """
        scales = int(self.block == "row")
        if isinstance(self.block, int):
            scales = -(-length // self.block)
        shifts = -(-length // self.pair) * self.shift_bits
        scale_bytes = 1 if self.scale == "power" else 4
        return -(-length * self.element.bits // 8) + scales * scale_bytes + -(-shifts // 8)

    @property
    def bits(self) -> float:
        """Bits of a number, its part of scale and shift included; those of a whole row or tensor
        are not counted.
        """
        scale_bits = SCALE_BITS if self.scale == "power" else 32
        scale = scale_bits / self.block if isinstance(self.block, int) else 0.0
        return self.element.bits + scale + self.shift_bits / self.pair

    @property
    def is_exact_in_bf16(self) -> bool:
        """Whether its values are bfloat16 numbers, but for those below 2**-126, which are
        subnormal.
        """
        return self.element.mantissa_bits <= 7 and (self.scale == "power" or self.block is None)


def _mx(element: str) -> Format:
    return Format(element=ELEMENTS[element], block=32)


def _bdr(bits: int) -> Format:
    return Format(element=whole(bits), block=16, pair=2, shift_bits=1)


def _fp8(element: str, block: Literal["row", "tensor"]) -> Format:
    return Format(element=ELEMENTS[element], block=block, scale="fp32")


FORMATS = {
    "bf16": Format(element=ELEMENTS["bf16"]),
    "fp16": Format(element=ELEMENTS["fp16"]),
    "e4m3": Format(element=ELEMENTS["e4m3"]),
    "e5m2": Format(element=ELEMENTS["e5m2"]),
    "fp8": _fp8("e4m3", "tensor"),
    "fp8-e5m2": _fp8("e5m2", "tensor"),
    "fp8-rowwise": _fp8("e4m3", "row"),
    "fp8-rowwise-e5m2": _fp8("e5m2", "row"),
    "mxfp8": _mx("e4m3"),
    "mxfp8-e5m2": _mx("e5m2"),
    "mxfp6": _mx("e2m3"),
    "mxfp6-e3m2": _mx("e3m2"),
    "mxfp4": _mx("e2m1"),
    "mxint8": _mx("int8"),
    "mx9": _bdr(7),
    "mx6": _bdr(4),
    "mx4": _bdr(2),
}
