from __future__ import annotations

import ctypes

# of glibc's malloc.h
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4


def keep_freed_memory() -> bool:
    """Let this process keep the memory it frees, for the next step to use; False where the C library cannot.

    Otherwise every large tensor of every step is new memory, and the system clears it page by page: on the machine
    of docs/LOG.md that took longer than a lookup. A program does this once, at its start; a library should not.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(M_MMAP_MAX, 0) and mallopt(M_TRIM_THRESHOLD, 2**31 - 1))
