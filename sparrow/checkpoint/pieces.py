"""Large files of a checkpoint: written and read in pieces, past the page cache, with a checksum that costs little.

SHA-256 takes longer than a disk. The checksum here is that of blocks, see `kernels.block_io.mixed_sum`.
"""

from __future__ import annotations

import mmap
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparrow.kernels.block_io import mixed_sum

PIECE = 8 << 20  # bytes
BUFFERS = 4  # pieces that are in memory at a time
WRITERS = 2  # threads that sum and write pieces
_ALIGNED = 4096  # what passes by the page cache begins and ends at a multiple of these bytes


def write(path: Path, parts: Iterable[Tensor]) -> dict[str, Any]:
    """Write a file that is on the disk when this returns. Returns its size and checksum, as the manifest says them.

    parts: uint8 [n] each, one after the other. Each is read before the next is asked for.

    Raises:
        OSError: when it cannot be written.
    """
    size, under_way, sums = 0, deque[tuple[mmap.mmap, Future[int]]](), list[Future[int]]()
    with _opened(path) as fd, ThreadPoolExecutor(WRITERS) as pool:  # a piece is filled while others are written
        for memory, length in _filled(parts, under_way):
            sums.append(pool.submit(_write_piece, fd, memory, length, size))
            under_way.append((memory, sums[-1]))
            size += length
        found = sum(written.result() for written in sums)
        os.ftruncate(fd, size)
        os.fsync(fd)
    return {"bytes": size, "mixed_sum": found % 2**64}


def sum_of(file: BufferedReader) -> int:
    """Returns the checksum of an open file."""
    sum, size = 0, 0
    memory = bytearray(PIECE)
    piece = torch.frombuffer(memory, dtype=torch.uint8)
    while length := file.readinto(memory):
        piece[length : -(-length // 8) * 8] = 0
        sum += mixed_sum(piece[: -(-length // 8) * 8].view(torch.int64), size // 8)
        size += length
    return sum % 2**64


def _filled(
    parts: Iterable[Tensor], under_way: deque[tuple[mmap.mmap, Future[int]]]
) -> Iterator[tuple[mmap.mmap, int]]:
    """Yields pieces of all parts, and how long each is: `PIECE`, but for the last."""
    memories = [mmap.mmap(-1, PIECE) for _ in range(BUFFERS)]
    memory, length = memories.pop(), 0
    for part in parts:
        while len(part):
            taken = min(len(part), PIECE - length)
            to_N = np.frombuffer(memory, np.uint8)  # numpy copies in this thread; torch's others would wait on a core
            to_N[length : length + taken] = part[:taken].numpy()
            part, length = part[taken:], length + taken
            if length == PIECE:
                yield memory, length
                if memories:
                    memory = memories.pop()
                else:
                    memory, written = under_way.popleft()
                    written.result()
                length = 0
    if length:
        yield memory, length


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """Gives a new file that passes by the page cache, where the system has that."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        if hasattr(os, "O_DIRECT"):
            with suppress(OSError):  # the first write shows whether it can
                direct = os.open(path, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)
                try:
                    with mmap.mmap(-1, _ALIGNED) as memory:
                        os.pwrite(direct, memory, 0)
                    os.dup2(direct, fd, inheritable=False)
                finally:
                    os.close(direct)
        yield fd
    finally:
        os.close(fd)


def _write_piece(fd: int, memory: mmap.mmap, length: int, at: int) -> int:
    """Writes a piece, padded to `_ALIGNED` bytes, at a place. Returns its part of the checksum of the file."""
    padded = -(-length // _ALIGNED) * _ALIGNED
    piece = torch.frombuffer(memory, dtype=torch.uint8)
    piece[length:padded] = 0
    found = mixed_sum(piece[: -(-length // 8) * 8].view(torch.int64), at // 8)
    data = memoryview(memory)[:padded]
    while len(data):
        written = os.pwrite(fd, data, at)
        data, at = data[written:], at + written
    return found
