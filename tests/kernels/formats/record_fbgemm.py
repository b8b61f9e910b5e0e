"""Writes fbgemm.safetensors beside this file: rows, what FBGEMM makes of them in 8 and 4 bits, and
what it reads there.

    python tests/kernels/formats/record_fbgemm.py   # with torch and fbgemm-gpu-cpu (benchmarks/README.md)

FBGEMM has rows of 4 bits only for dims that 4 divides. The rows are stored, as random numbers may
differ elsewhere.
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

RECORD = Path(__file__).with_name("fbgemm.safetensors")
DIMS = (1, 2, 3, 4, 5, 8, 16, 33, 36, 64, 130)


def rows(dim: int) -> Tensor:
    """Rows of many kinds, [24 to 28, dim]."""
    random = torch.Generator().manual_seed(dim)
    some = torch.randn(17, dim, generator=random)
    some[:8] *= 10.0 ** -torch.arange(8.0)[:, None]
    some[8:10] = -some[8:10].abs() - 1e-3  # below zero alone
    some[10:13] = some[10:13].abs() + torch.tensor([[3.0], [300.0], [-300.0]])  # far from zero
    # one far from the others, and one beyond float16
    some[13, dim // 2], some[14, -1] = 100.0, -70_000.0
    some[15:] = torch.randint(0, 511, (2, dim), generator=random) / 2  # halfway between two codes
    some[15:, 0], some[15:, -1] = 0.0, torch.tensor([255.0, 15.0])
    some[16].clamp_(max=15.0)
    same = torch.tensor([0.0, 0.5, -1e-3, 1e-7, -1e-7, 3.3, 65_504.0])[:, None].expand(-1, dim)
    return torch.cat([some, same, close(dim, random)])


def close(dim: int, random: torch.Generator) -> Tensor:
    """Up to four rows whose codes change if 255 is multiplied by a reciprocal instead of being
    divided.
    """
    drawn = torch.randn(20_000, dim, generator=random)
    above, range_1 = (
        drawn - drawn.amin(1, keepdim=True),
        drawn.amax(1, keepdim=True) - drawn.amin(1, keepdim=True),
    )
    codes = [
        (above * by).round() for by in (torch.tensor(255.0) / range_1, range_1.reciprocal() * 255.0)
    ]
    return drawn[(codes[0] != codes[1]).any(1)][:4]


def main() -> None:
    """Record them."""
    import fbgemm_gpu  # noqa: F401

    ops, found = torch.ops.fbgemm, {}
    for dim in DIMS:
        given = found[f"{dim} rows"] = rows(dim)
        int8 = found[f"{dim} int8"] = ops.FloatToFused8BitRowwiseQuantized(given)
        found[f"{dim} int8 read"] = ops.Fused8BitRowwiseQuantizedToFloat(int8)
        if dim % 4 == 0:
            int4 = found[f"{dim} int4"] = ops.FloatToFusedNBitRowwiseQuantizedSBHalf(given, 4)
            found[f"{dim} int4 read"] = ops.FusedNBitRowwiseQuantizedSBHalfToFloat(int4, 4)
    versions = {name: importlib.metadata.version(name) for name in ("torch", "fbgemm-gpu-cpu")}
    save_file(found, RECORD, versions)
    print(f"{RECORD}: {RECORD.stat().st_size} bytes, {versions}")


if __name__ == "__main__":
    main()
