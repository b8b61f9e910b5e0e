"""bf16 on units for it, with sums in fp32. Results are rounded to bf16."""

from __future__ import annotations

import platform

import torch
from torch import Tensor

from sparrow.layers.candidates._dense import product

FORMATS = ("bf16", "bf16")
NEVER = ""
OLDEST = (8, 0)  # compute capability


def missing(device: torch.device) -> str:
    """See the package. Without units a bf16 product takes several times as long as one of fp32."""
    if device.type == "cuda":
        found = torch.cuda.get_device_capability(device)
        return "" if found >= OLDEST else f"this GPU has compute capability {found[0]}.{found[1]}, 8.0 has bf16 units"
    if device.type != "cpu":
        return ""
    if platform.machine() in ("x86_64", "AMD64"):
        has_units = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    else:  # torch knows of ARM; where it does not say, fp32 is what is never slow
        has_units = hasattr(torch.cpu, "get_capabilities") and bool(torch.cpu.get_capabilities().get("bf16"))
    return "" if has_units else "this processor has no bf16 units"


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """See the package."""
    return product(a.bfloat16(), b.bfloat16()).float()


def takes(a: Tensor, b: Tensor) -> bool:
    """See the package."""
    return True
