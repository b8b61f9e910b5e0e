from __future__ import annotations

import platform
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch
from torch import Tensor

from sparrow.core.repeated import plain

Precision = Literal["fp32", "bf16"]


def computing(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """Returns a context in which matrix products run in `precision`.

    bf16 rounds the inputs of products. Weights, sums and the loss stay fp32.
    """
    if precision == "fp32" and not torch.is_autocast_enabled(device.type):
        return nullcontext()  # the other one takes longer than a product of one row
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")


def lacks_bf16(device: torch.device) -> bool:
    """Returns whether bf16 is slower than fp32 there: on x86 processors with neither AVX-512 BF16 nor AMX."""
    if device.type != "cpu" or platform.machine() not in ("x86_64", "AMD64"):
        return False
    return not (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def to_compute(x: Tensor) -> Tensor:
    """Returns x in the type that matrix products run in, so that what stands between two products is as narrow."""
    whole = plain(x)
    dtype = compute_dtype(whole)
    return x if whole.dtype == dtype else x.to(dtype)


def compute_dtype(x: Tensor) -> torch.dtype:
    """Returns the type that matrix products with x run in."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
