"""Training over a table on an SSD beside one that is a mapped file, with the same memory: a part of tiers.py."""

from __future__ import annotations

import ctypes
import mmap
import os
import statistics
import time
from dataclasses import replace
from pathlib import Path

import torch
from limited import group, limited
from tiers_train import BATCH, TURN, Case, Side, Zipf, filled_file

from sparrow.embeddings import Component
from sparrow.embeddings.tiers import MemoryStore, stored_in
from sparrow.kernels.formats import bf16

LARGE = 100_000  # rows of a table that is mapped
PAGE = 4096
Rates = tuple[float, float, float]


def on_ssd(cases: list[Case], folder: Path, turns: int) -> list[Rates]:
    """Returns examples/s of each case with the table on an SSD: the quartiles."""
    disk = filled_file(replace(cases[0], frames=2 << 20), folder)
    side = Side(cases[0], folder)
    store = disk.under(side)
    os.unlink(disk.path)
    found = [_rates(side, case, turns) for case in cases]
    store.close()
    return found


class MappedTable(MemoryStore):
    """Rows in memory, which a file backs: each field is a mapped file."""

    def __init__(self, component: Component, rows: int, dim: int, folder: Path) -> None:
        super().__init__(component, rows, dim, "meta")
        for name, field in component.fields_of(dim).items():
            path, shape = folder / f"mapped-{name}", field.shape(rows)
            mapped = torch.from_file(str(path), shared=True, size=torch.Size(shape).numel(), dtype=field.dtype)
            place, size = ctypes.c_void_p(mapped.data_ptr()), ctypes.c_size_t(mapped.nbytes)
            ctypes.CDLL(None).madvise(place, size, mmap.MADV_RANDOM)  # else each fault would read 128 KiB
            self.register_buffer(name, mapped.view(shape), persistent=False)


def mapped(cases: list[Case], folder: Path, turns: int) -> list[Rates]:
    """Returns the same with mapped files: of values, of states and of bits.

    States and bits are in memory, so that a row costs one page at most. So are pages of the most frequent values, as
    many as there is room.
    """

    def made(component: Component, rows: int, dim: int) -> MemoryStore:
        return MappedTable(component, rows, dim, folder) if rows > LARGE else MemoryStore(component, rows, dim)

    begun = time.perf_counter()
    with stored_in(made):
        side = Side(cases[0], None, cases[0].rows)
    os.sync()
    files = sorted(folder.glob("mapped-*"), key=lambda file: -file.stat().st_size)
    beside = sum(file.stat().st_size for file in files[1:])
    print(f"mapped: {sum(file.stat().st_size for file in files) / 1e9:.1f} GB written", flush=True)
    draw = Zipf(cases[0].rows, cases[0].skew, 0)
    for file in files[1:]:
        with open(file, "rb", buffering=0) as opened:
            while opened.read(1 << 24):
                pass
    hottest_N = draw.scattered(torch.arange(max(cases[0].frames - beside, 0) // PAGE))
    with open(files[0], "rb") as values:
        row_bytes = files[0].stat().st_size // cases[0].rows
        for at in (hottest_N * row_bytes // PAGE * PAGE).tolist():
            os.posix_fadvise(values.fileno(), at, PAGE, os.POSIX_FADV_WILLNEED)
    print(f"made in {time.perf_counter() - begun:.0f} s", flush=True)
    found = [_rates(side, case, turns) for case in cases]
    for file in files:
        file.unlink()
    return found


def _rates(side: Side, case: Case, turns: int) -> Rates:
    side.turn_to(case)
    side.steps(2 * TURN)
    low, middle, high = statistics.quantiles([TURN * BATCH / side.steps(TURN)[0] for _ in range(turns)], n=4)
    return low, middle, high


def run(folder: Path, quick: bool, rows: int) -> None:
    """Print examples/s of both, one after the other, each in a group with 12 GiB of memory for 1e9 rows."""
    rows, turns = (20_000_000, 3) if quick else (rows, 9)
    near = bf16.Config(rounding="nearest")
    one = Case(rows=rows, frames=int(8 * 2**30 * rows / 1e9), lookups=1, skew=1.05, format=near)
    cases = [one, replace(one, lookups=4)]
    beside = 2**30 * (rows < 500_000_000)  # what a process needs, which is little beside 12 GiB
    with group("memory", memory__limit_in_bytes=str(int(12 * 2**30 * rows / 1e9) + beside)) as within:
        ours, theirs = (limited([within], work, cases, folder, turns) for work in (on_ssd, mapped))
    for case, mine, its, goal in zip(cases, ours, theirs, (1.5, 2.0), strict=True):
        ratio = mine[1] / its[1]
        print(case)
        print(f"examples/s {mine[1]:,.0f} ({mine[0]:,.0f} to {mine[2]:,.0f}), mapped file {its[1]:,.0f}", end="")
        print(f" ({its[0]:,.0f} to {its[2]:,.0f})")
        met = "met" if ratio >= goal else "missed"
        print(f"TARGET over a mapped file, {case.lookups} ids: {ratio:.2f} (goal {goal}) {met}", flush=True)
