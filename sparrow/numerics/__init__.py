"""Number formats and rounding, defined in plain torch. `kernels/quantise` does the same in C++, bit for bit.

A format is an element (which numbers there are), a scale that some numbers share, and perhaps a shift that a few of
them share (`Format`). Elements and formats are data: a row of a table each. To add one, add its row.
"""

from sparrow.numerics.blocks import Packed, decode, encode, rounded
from sparrow.numerics.elements import ELEMENTS, Element, whole
from sparrow.numerics.formats import FORMATS, Format
from sparrow.numerics.rounding import Rounding

__all__ = ["ELEMENTS", "FORMATS", "Element", "Format", "Packed", "Rounding", "decode", "encode", "rounded", "whole"]
