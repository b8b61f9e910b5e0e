"""fp32, which the others have to be faster than."""

from __future__ import annotations

import torch
from torch import Tensor

from sparrow.layers.candidates._dense import product

FORMATS = ("fp32", "fp32")
NEVER = ""


def missing(device: torch.device) -> str:
    """See the package."""
    return ""


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """See the package."""
    return product(a.float(), b.float())


def takes(a: Tensor, b: Tensor) -> bool:
    """See the package."""
    return True
