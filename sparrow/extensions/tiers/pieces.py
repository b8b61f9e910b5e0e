"""Large files of a checkpoint: written and read in pieces, past the page cache, with a checksum
that costs little.

SHA-256 takes longer than a disk. The checksum here is that of blocks, see
`kernels.checksum.mixed_sum`.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparrow.core.errors import UserError
from sparrow.kernels.checksum import joined, mixed_sum

PIECE = 4 << 20  # bytes
WRITERS = 3  # threads that fill, sum and write a piece each
Parts = Callable[[int, int], Iterable[Tensor]]
"""(first, last) -> those bytes of a file, uint8, one part after another."""
_ALIGNED = 4096  # what passes by the page cache begins and ends at a multiple of these bytes


def write(path: Path, size: int, parts: Parts) -> dict[str, Any]:
    """Write a file that is on the disk when this returns. Returns its size and checksum, as the
    manifest says them.

    Args:
        size: in bytes.
        parts: gives the bytes of a piece. Several threads call it.

    Raises:
        OSError: when it cannot be written.
    """
    own = threading.local()

    def write_piece(fd: int, first: int) -> int:
        if not hasattr(own, "memory"):
            # O_DIRECT can write from it
            own.memory = mmap.mmap(-1, PIECE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            # where there are huge pages: pages of 4 KiB take longer to come than their bytes to be
            # written
            with suppress(AttributeError, OSError):
                own.memory.madvise(mmap.MADV_HUGEPAGE)
        last = min(first + PIECE, size)
        padded = -(-(last - first) // _ALIGNED) * _ALIGNED
        piece = torch.frombuffer(own.memory, dtype=torch.uint8, count=padded)
        checksum = joined(piece, list(parts(first, last)), first // 8)
        _write_piece(fd, memoryview(own.memory)[:padded], first)
        return checksum

    # one fills a piece while another waits for the disk
    with _opened(path) as fd, ThreadPoolExecutor(WRITERS) as pool:
        total = sum(pool.map(partial(write_piece, fd), range(0, size, PIECE)))
        os.ftruncate(fd, size)
        os.fsync(fd)
    return {"bytes": size, "mixed_sum": total % 2**64}


def sum_of(file: BufferedReader) -> int:
    """Returns the checksum of an open file.

    Raises:
        UserError: when the device fails.
    """
    sum = 0
    size = 0
    memory = bytearray(PIECE)
    piece = torch.frombuffer(memory, dtype=torch.uint8)
    try:
        while length := file.readinto(memory):
            piece[length : -(-length // 8) * 8] = 0
            sum += mixed_sum(piece[: -(-length // 8) * 8].view(torch.int64), size // 8)
            size += length
    except OSError as error:
        remedy = (
            "check the device, or delete the checkpoint's folder to fall back to the one before it"
        )
        raise UserError(f"{file.name}: cannot be read ({error.strerror}); {remedy}") from error
    return sum % 2**64


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


def _write_piece(fd: int, data: memoryview, at: int) -> None:
    """Writes a piece at a place."""
    while len(data):
        written = os.pwrite(fd, data, at)
        data = data[written:]
        at = at + written
