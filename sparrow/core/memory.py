from __future__ import annotations

import ctypes
import math
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from sparrow.core.groups import folders, lines

# of glibc's malloc.h
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
M_MMAP_MAX = -4
M_ARENA_MAX = -8

THREADS = 48 << 20  # bytes that threads of a run reserve, mostly for their stacks, and do not use
# Arrow's allocator would reserve 1 GiB or all that a limit leaves, and numpy's matrix products 32
# MB a core. Arrow is told below to use another allocator, and numpy multiplies no matrices here.
SMALL_RESERVES = {
    "MIMALLOC_ARENA_RESERVE": "16384",
    "MIMALLOC_ARENA_EAGER_COMMIT": "0",
    "OPENBLAS_NUM_THREADS": "1",
}


def keep_freed_memory() -> None:
    """Make this process keep the memory that it frees, for the next step to use, if the C library
    can do that.

    Otherwise every large tensor of every step is new memory, which the system clears page by page.
    When that was measured, it took longer than a lookup. A program does this once, at its start. A
    library should not.
    """
    # else it keeps memory of its own; read at its import
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    # torch aligns large tensors to pages then. Otherwise a block that one left has a few bytes too
    # little for the next of its size, and small objects settle in it: the memory kept grew to twice
    # of what was used.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    for name, value in SMALL_RESERVES.items():
        os.environ.setdefault(name, value)
    _set((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, 2**31 - 1))


def return_freed_memory() -> None:
    """Make this process give large blocks back as soon as it frees them, if the C library can do
    that.

    A preparation allocates blocks of many sizes. If it kept them, the holes between them would take
    as much memory as what is used.
    """
    if sys.platform == "linux":
        os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "jemalloc")
    _set((M_MMAP_THRESHOLD, 1 << 20), (M_TRIM_THRESHOLD, 1 << 20))


def _set(*settings: tuple[int, int]) -> None:
    """Set options of malloc, and one heap for all threads."""
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for setting in (*settings, (M_ARENA_MAX, 1)):
            mallopt(*setting)


def leave_out(package: str, importer: str = "") -> None:
    """Hide a package from this process, so that optional imports of it by other packages find
    nothing.

    importer: the module that is not to find it while it is imported itself; by default no module
    finds it.
    """

    def is_hidden() -> bool:
        spec = getattr(sys.modules.get(importer), "__spec__", None)
        return not importer or getattr(spec, "_initializing", False)

    class Without:
        def __init__(self, finder: Any) -> None:
            self._finder = finder

        def find_spec(self, name: str, *more: Any) -> Any:
            if name == package and is_hidden():
                return None
            return self._finder.find_spec(name, *more)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._finder, name)

    sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]


def let_go() -> None:
    """Give freed memory back to the system, after work that will not be done again."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def resident_bytes() -> int:
    """Returns the bytes of memory that this process holds now, or 0 if the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0


def available_bytes() -> int | None:
    """Returns the bytes of memory that this process can still get, or None if the system does not
    say.

    The machine limits them, or the control groups of the process if these have less.
    """
    try:
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None
    return min([free, *_cgroup_bytes()])


def limit_bytes() -> float:
    """Returns the bytes of memory that the limits of this process (ulimit -v, -d) leave it;
    infinity without any.

    What has been reserved is gone, whether it is used or not, and so is what threads will reserve.
    """
    try:
        import resource

        used = [
            int(pages) * os.sysconf("SC_PAGE_SIZE")
            for pages in Path("/proc/self/statm").read_text().split()
        ]
    except (ImportError, OSError):
        return math.inf
    size, _, _, _, _, data, _ = used
    left = math.inf
    for kind, now in ((resource.RLIMIT_AS, size), (resource.RLIMIT_DATA, data)):
        limit = resource.getrlimit(kind)[0]
        if limit != resource.RLIM_INFINITY:
            left = min(left, max(limit - now - THREADS, 0))
    return left


def _cgroup_bytes() -> Iterator[int]:
    """Yields the bytes that each control group of this process has left; page cache counts as
    free.
    """
    for folder, version in folders("memory"):
        limit, used = ("max", "current") if version == 2 else ("limit_in_bytes", "usage_in_bytes")
        most = lines(folder / f"memory.{limit}")
        now = lines(folder / f"memory.{used}")
        if most and now and most[0].isdigit() and int(most[0]) < 1 << 60:
            cache = dict(
                line.split() for line in lines(folder / "memory.stat") if len(line.split()) == 2
            )
            yield max(int(most[0]) - int(now[0]) + int(cache.get("inactive_file", 0)), 0)


def gb(size: float) -> str:
    """Returns a number of bytes in words, for messages."""
    return f"{size / 1e9:.2f} GB" if size >= 1e7 else f"{size / 1e6:.2f} MB"
