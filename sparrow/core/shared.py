"""Memory that processes share, by the path of a file in memory."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from sparrow.core.forks import finalize


def shared_memory(path: Path, words: int, begin: Callable[[Tensor, bool], None]) -> Tensor:
    """Returns memory that all processes have who give this path, int32 [words]. The last one
    removes the file.

    Args:
        path: of a file on a file system in memory, such as under /dev/shm. It is made if it is not
            there.
        words: how many numbers. All give the same.
        begin: (memory, whether nobody has begun it yet) -> None. No other process is at it
            meanwhile. One that is killed here has not begun it.

    Raises:
        OSError: when there is no room for it.
    """
    size = 4 * words
    folder = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
    file = -1
    is_new = False
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)  # who opens or removes files there
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(file, fcntl.LOCK_SH)  # as long as it is used
        is_new = os.fstat(file).st_size <= size
        if is_new:
            # else a process would be killed where no room is left
            os.posix_fallocate(file, 0, size)
        memory = mmap.mmap(file, size)
        counters = torch.frombuffer(memory, dtype=torch.int32)
        begin(counters, is_new)
        os.ftruncate(file, size + 1)  # it has begun
    except BaseException:
        if file >= 0:
            os.close(file)
        if is_new:
            path.unlink()
        raise
    finally:
        os.close(folder)
    finalize(memory, _leave, file, path)  # the tensor keeps it
    return counters


def _leave(file: int, path: Path) -> None:
    """Let go of a file, and remove it if nobody else has it. One that is left goes with its
    folder.
    """
    with suppress(OSError):
        folder = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
        try:
            # it may be this thread that holds it
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
        finally:
            os.close(folder)
    os.close(file)
