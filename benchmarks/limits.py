"""This machine's limits, measured: bandwidth of reading rows at random and of copying, on all
threads.
"""

from __future__ import annotations

import ctypes
import functools
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from _peers.tiny import sized

from sparrow.core.pages import empty_rows


@functools.cache
def _library() -> ctypes.CDLL | None:
    """The loops of limits.c, or None without a C compiler."""
    folder = tempfile.mkdtemp()
    source, library = Path(__file__).with_name("limits.c"), f"{folder}/limits.so"
    command = [
        "cc",
        "-O3",
        "-march=native",
        "-ffast-math",
        "-shared",
        "-fPIC",
        str(source),
        "-o",
        library,
    ]
    try:
        subprocess.run(command, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"no limits: {error}", file=sys.stderr)
        return None
    found = ctypes.CDLL(library)
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    found.gather.argtypes, found.gather.restype = [pointer, number, pointer, number], ctypes.c_float
    found.copy.argtypes, found.copy.restype = [pointer, pointer, number], None
    return found


def _seconds(work: Callable[[int], object]) -> float:
    """Median time of `work(thread)` on all threads at once; ctypes lets go of the interpreter while
    it runs.
    """
    threads, times = torch.get_num_threads(), []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(sized(7, 2)):
            begin = time.perf_counter()
            list(pool.map(work, range(threads)))
            times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


@functools.cache
def gather_gb_per_s(dim: int, bytes_tables: int) -> float | None:
    """Reading rows of `dim` floats at uniformly random places of so much memory."""
    library = _library()
    if library is None:
        return None
    rows = empty_rows(max(1, bytes_tables // (4 * dim)), dim).fill_(1.0)
    slots = torch.randint(0, len(rows), (sized(max(1 << 17, (256 << 20) // (4 * dim)), 1 << 10),))
    part = len(slots) // torch.get_num_threads()

    def work(thread: int) -> None:
        library.gather(rows.data_ptr(), dim, slots[thread * part :].data_ptr(), part)

    return part * torch.get_num_threads() * dim * 4 / _seconds(work) / 1e9


@functools.cache
def copy_gb_per_s() -> float | None:
    """Copying 512 MiB, bytes read and bytes written counted."""
    library = _library()
    if library is None:
        return None
    size = sized(512 << 20, 1 << 20)
    one, two = (empty_rows(size, dtype=torch.uint8).fill_(1) for _ in range(2))
    part = size // torch.get_num_threads()

    def work(thread: int) -> None:
        library.copy(two.data_ptr() + thread * part, one.data_ptr() + thread * part, part)

    return 2 * part * torch.get_num_threads() / _seconds(work) / 1e9


@functools.cache
def bytes_last_level_cache() -> int:
    """As the kernel says, 32 MiB where it does not."""
    sizes = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    return max((int(s.read_text().strip()[:-1]) << 10 for s in sizes), default=32 << 20)
