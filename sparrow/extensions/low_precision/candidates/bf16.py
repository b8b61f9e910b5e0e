"""bf16 on units for it, with sums in fp32. Results are rounded to bf16."""

from __future__ import annotations

import torch
from torch import Tensor

from sparrow.extensions.low_precision.candidates._dense import product
from sparrow.layers.precisions import bf16

FORMATS = ("bf16", "bf16")
NEVER = ""


def missing(device: torch.device) -> str:
    """Returns why the candidate is not available on a device, or ""."""
    return bf16.missing(device)


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """Returns a b, fp32."""
    return product(a.bfloat16(), b.bfloat16()).float()


def takes(a: Tensor, b: Tensor) -> bool:
    """Returns whether it can multiply matrices of these shapes."""
    return True
