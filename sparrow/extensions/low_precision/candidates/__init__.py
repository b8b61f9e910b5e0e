"""Ways to compute a matrix product natively, one file each, among which a dispatch chooses (LoKA,
arXiv 2605.10886).

File `x.py` is the candidate "x". FORMATS are those of a and b in the product a b, as in
`numerics.FORMATS`. No other candidate has the same, because a recipe names its candidates by them.
NEVER says what no machine has run so far, or "". `missing(device)` says why it is not available on
a device, or "". `takes(a, b)` says whether it takes these shapes. `multiply(a, b)` returns a b [M,
N], fp32, of a [M, K] and b [K, N], each fp32 or bf16. It makes the conversions.
"""

from __future__ import annotations

import importlib
from typing import Protocol, cast

import torch
from torch import Tensor

from sparrow.core.config import Family


class Candidate(Protocol):
    """What a file of this folder offers."""

    FORMATS: tuple[str, str]
    NEVER: str

    def missing(self, device: torch.device) -> str:
        """Returns why it is not available there, or ""."""
        ...

    def takes(self, a: Tensor, b: Tensor) -> bool:
        """Returns whether it can multiply matrices of these shapes."""
        ...

    def multiply(self, a: Tensor, b: Tensor) -> Tensor:
        """Returns a b."""
        ...


def candidates() -> dict[str, Candidate]:
    """Returns all candidates by their names."""
    names = Family(__name__).names()
    return {name: cast(Candidate, importlib.import_module(f"{__name__}.{name}")) for name in names}
