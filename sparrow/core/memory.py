from __future__ import annotations

import ctypes
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


def keep_freed_memory() -> None:
    """Make this process keep the memory that it frees, for the next step to use, if the C library can do that.

    Otherwise every large tensor of every step is new memory, which the system clears page by page. On the machine of
    docs/LOG.md that took longer than a lookup. A program does this once, at its start. A library should not.
    """
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")  # else it keeps memory of its own; read at its import
    _set((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, 2**31 - 1))


def return_freed_memory() -> None:
    """Make this process give large blocks back as soon as it frees them, if the C library can do that.

    A preparation allocates blocks of many sizes. If it kept them, the holes between them would take as much memory as
    what is used.
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


def leave_out(package: str) -> None:
    """Hide a package from this process, so that optional imports of it by other packages find nothing."""

    class Without:
        def __init__(self, finder: Any) -> None:
            self._finder = finder

        def find_spec(self, name: str, *more: Any) -> Any:
            return None if name == package else self._finder.find_spec(name, *more)

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
    """Returns the bytes of memory that this process can still get, or None if the system does not say.

    The machine limits them, or the control groups of the process if these have less.
    """
    try:
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None
    return min([free, *_cgroup_bytes()])


def _cgroup_bytes() -> Iterator[int]:
    """Yields the bytes that each control group of this process has left; page cache counts as free."""
    for folder, version in folders("memory"):
        limit, used = ("max", "current") if version == 2 else ("limit_in_bytes", "usage_in_bytes")
        most, now = lines(folder / f"memory.{limit}"), lines(folder / f"memory.{used}")
        if most and now and most[0].isdigit() and int(most[0]) < 1 << 60:
            cache = dict(line.split() for line in lines(folder / "memory.stat") if len(line.split()) == 2)
            yield max(int(most[0]) - int(now[0]) + int(cache.get("inactive_file", 0)), 0)


def gb(size: float) -> str:
    """Returns a number of bytes in words, for messages."""
    return f"{size / 1e9:.2f} GB" if size >= 1e7 else f"{size / 1e6:.2f} MB"
