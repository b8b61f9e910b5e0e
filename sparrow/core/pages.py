from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

HUGE = 4 << 20  # bytes from which pages of 2 MiB are asked for


def empty_rows(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    """Returns uninitialised memory for rows that are read at random, in pages of 2 MiB where the
    system offers them.

    With pages of 4 KiB most of a lookup in a large table is spent on finding the page.

    Args:
        shape: of the rows.
        dtype: of their numbers.
        device: where they are; the pages are those of a host.
    """
    count = math.prod(shape)
    bytes_rows = count * dtype.itemsize
    if device != "cpu" or bytes_rows < HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, bytes_rows, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=count).view(shape)  # keeps the memory alive
