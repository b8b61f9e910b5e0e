"""Ways to compute a matrix product natively, one file each, among which a dispatch chooses (LoKA, arXiv 2605.10886).

File `x.py` is the candidate "x". It says by `missing(device)` why it is not available on a device, or "". It says by
PRECISION whose recipe it computes, and by NEVER what no machine has run so far, or "". `takes(a, b)` says whether it
takes these shapes. `multiply(a, b)` returns a b [M, N] of fp32 a [M, K] and b [K, N], conversions included.
"""

from __future__ import annotations

import importlib
from typing import Protocol, cast

import torch
from torch import Tensor

from sparrow.core.config import Family


class Candidate(Protocol):
    """What a file of this folder offers."""

    PRECISION: str
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
