"""E4M3 with a scale for each row of a and each column of b, on a GPU's FP8 units by `F.scaled_mm`.

Results are rounded to bf16. It was never run on a GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

FORMATS = ("fp8-rowwise", "fp8-rowwise")
NEVER = "never run on a GPU"
LARGEST = 448.0  # E4M3
LEAST_SCALE = 2.0**-126
ALIGNED = 16  # sizes that the units take are multiples of it
OLDEST = (8, 9)  # compute capability


def missing(device: torch.device) -> str:
    """Returns why the candidate is not available on a device, or ""."""
    if device.type != "cuda":
        return "FP8 units are a GPU's"
    capability = torch.cuda.get_device_capability(device)
    if capability >= OLDEST:
        return ""
    return f"this GPU has compute capability {capability[0]}.{capability[1]}, 8.9 has FP8 units"


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """Returns a b, fp32."""
    (a8, scale_a), (b8, scale_b) = cast(a), cast(b.t())
    by_row = F.ScalingType.RowWise
    product: Tensor = F.scaled_mm(
        a8, b8.t(), scale_a, by_row, scale_b.t(), by_row, output_dtype=torch.bfloat16
    )
    return product.float()


def takes(a: Tensor, b: Tensor) -> bool:
    """Returns whether it can multiply matrices of these shapes."""
    return a.dim() == b.dim() == 2 and all(size % ALIGNED == 0 for size in (*a.shape, b.shape[1]))


def cast(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    """Returns E4M3 numbers [M, K] and their scales [M, 1], fp32: those of the format
    "fp8-rowwise".
    """
    x_MK = x_MK.float().contiguous()
    most = x_MK.abs().amax(1, keepdim=True)
    scale = torch.where(
        most == 0, 1.0, (most / torch.full_like(most, LARGEST)).clamp(min=LEAST_SCALE)
    )
    return (x_MK / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scale
