from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Literal

import torch
from torch import Tensor

Precision = Literal["fp32", "bf16"]


def computing(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """Within it matrix products run in `precision`: bf16 rounds their inputs; weights, sums and the loss stay fp32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")


def to_compute(x: Tensor) -> Tensor:
    """x in the type that products around it run in, so that what stands between two products is as narrow."""
    return x.to(compute_dtype(x))


def compute_dtype(x: Tensor) -> torch.dtype:
    """The type that products with x run in."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
