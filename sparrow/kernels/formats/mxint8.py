from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sparrow.kernels.formats._mx import Mx


@dataclass(frozen=True, kw_only=True)
class Config(Mx):
    """A row is in MXINT8: whole numbers of 8 bits, and a power of two for each 32 of them; 33 bytes
    (arXiv 2310.10537).

    Columns can be cut between the 32. rounding: "stochastic", whose mean is the number itself, or
    "nearest". scale: "ceil" is the least power of two under which nothing is cut off. "floor",
    which is OCP's, cuts up to a 128th off the largest of the 32, and goes with "nearest". See `Mx`.
    """

    known: ClassVar[str] = "mxint8"
