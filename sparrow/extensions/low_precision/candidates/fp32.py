"""fp32, which the others have to be faster than."""

from __future__ import annotations

import torch
from torch import Tensor

from sparrow.extensions.low_precision.candidates._dense import product

FORMATS = ("fp32", "fp32")
NEVER = ""


def missing(device: torch.device) -> str:
    """Returns why the candidate is not available on a device, or ""."""
    return ""


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """Returns a b, fp32."""
    return product(a.float(), b.float())


def takes(a: Tensor, b: Tensor) -> bool:
    """Returns whether it can multiply matrices of these shapes."""
    return True
