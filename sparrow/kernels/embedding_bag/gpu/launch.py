"""How kernels are started, and how the host's numbers reach them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor

from sparrow.kernels import is_interpreted

INTERPRETED = is_interpreted()  # when the kernels beside this file were defined
# numbers of a tile: many for the interpreter, as few as registers hold on a GPU
TILE = 2048 if INTERPRETED else 512
# no fused multiply-add: it rounds once, the reference twice
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
SIZE = triton.language.constexpr(1024)  # entries of a program that sums nothing
# of kernels that find out on the device how many rows there are
PROGRAMS = 2 if INTERPRETED else 4096

# makes a kernel, which is not compiled again for a batch of another length
kernel: Any = triton.jit(
    do_not_specialize=["N", "E", "U", "BLOCKS", "entry", "last_entry", "first_key"]
)


def launch(
    program: Any, grid: Sequence[int], device: torch.device, *arguments: Any, **constants: Any
) -> None:
    """Run a kernel over a grid. An empty grid is no error."""
    if 0 in grid:
        return
    if INTERPRETED:
        with np.errstate(all="ignore"):
            program[tuple(grid)](*arguments, **constants)
        return
    with torch.cuda.device(device):
        program[tuple(grid)](*arguments, **constants, **OPTIONS)


def block_of(dim: int) -> int:
    """Returns BLOCK_D for D columns."""
    return int(triton.next_power_of_2(dim))


def rows_of(dim: int) -> int:
    """Returns ROWS for D columns."""
    return max(1, TILE // block_of(dim))


def blocks(count: int, rows: int) -> int:
    """Returns how many tiles of so many rows hold `count` rows."""
    return -(-count // rows)


def numbers(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Returns int64 numbers on a device, of rows of equal length, without waiting for it."""
    return _numbers(tuple(chain.from_iterable(rows)), device)[1]


@lru_cache(maxsize=512)  # a step that repeats repeats its addresses
def _numbers(flat: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """On the host, where a captured graph copies them from again, and on the device."""
    host = torch.tensor(flat, dtype=torch.int64)
    if device.type == "cuda":
        host = host.pin_memory()
    return host, host.to(device, non_blocking=True)
