"""Training over a table on an SSD beside one that is a mapped file, with the same memory: a part of
tiers.py.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from _peers.targets import print_target
from limited import group, standing
from tiers_blocks import probed
from tiers_train import BATCH, QUICK, TURN, Case, Side, Zipf, filled_file, skew_of_traces

from sparrow.embeddings import Component, Placement
from sparrow.embeddings.stores import MemoryStore
from sparrow.extensions.tiers.stores.ssd import SsdStore
from sparrow.kernels.formats import bf16

LARGE = 100_000  # rows of a table that is mapped
PAGE = 4096
WARM = 2  # turns of a case that are not counted
Turn = Callable[[int], tuple[float, str]]
"""Trains a turn of the case with this number. Returns the seconds, and a digest of all logits."""


def on_ssd(cases: list[Case], folder: Path) -> Turn:
    """Returns what trains with the table on an SSD."""
    disk = filled_file(replace(cases[0], frames=2 << 20), folder)
    side = Side(cases[0], folder)
    store = disk.under(side)
    os.unlink(disk.path)
    return turns(side, cases, store)


class MappedTable(MemoryStore):
    """Rows in memory, which a file backs: each field is a mapped file."""

    def __init__(self, component: Component, rows: int, dim: int, folder: Path) -> None:
        super().__init__(component, rows, dim, "meta")
        for name, field in component.fields_of(dim).items():
            path, shape = folder / f"mapped-{name}", field.shape(rows)
            mapped = torch.from_file(
                str(path), shared=True, size=torch.Size(shape).numel(), dtype=field.dtype
            )
            place, size = ctypes.c_void_p(mapped.data_ptr()), ctypes.c_size_t(mapped.nbytes)
            # else each fault would read 128 KiB
            ctypes.CDLL(None).madvise(place, size, mmap.MADV_RANDOM)
            self.register_buffer(name, mapped.view(shape), persistent=False)


def mapped(cases: list[Case], folder: Path) -> Turn:
    """Returns what trains with mapped files: of values, of states and of bits.

    States and bits are in memory, so that a row costs one page at most. So are pages of the most
    frequent values, as many as there is room.
    """

    def made(component: Component, rows: int, dim: int) -> MemoryStore:
        return (
            MappedTable(component, rows, dim, folder)
            if rows > LARGE
            else MemoryStore(component, rows, dim)
        )

    begun = time.perf_counter()
    side = Side(cases[0], None, cases[0].rows, Placement(store=made))
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
    for file in files:
        file.unlink()
    print(f"made in {time.perf_counter() - begun:.0f} s", flush=True)
    return turns(side, cases)


def turns(side: Side, cases: list[Case], store: SsdStore | None = None) -> Turn:
    """Returns what trains turns of a side."""
    current = [-1]

    def turn(number: int) -> tuple[float, str]:
        if current != [number]:
            side.turn_to(cases[number])
            side.depth = cases[number].ahead  # of both, so that both train on the same batches
            current[0] = number
        seconds, logits = side.steps(TURN, store)
        return seconds, hashlib.sha256(torch.cat(logits).numpy().tobytes()).hexdigest()

    return turn


def run(folder: Path, quick: bool, rows: int) -> None:
    """Print examples/s of both, in turns, each in a group of its own with 12 GiB of memory for 1e9
    rows.
    """
    rows, count, batch = (500_000, 2, QUICK) if quick else (rows, 9, BATCH)
    near, steep = bf16.Config(rounding="nearest"), skew_of_traces(1_000_000_000)
    one = Case(
        rows=rows,
        frames=int(8 * 2**30 * rows / 1e9),
        lookups=1,
        skew=1.05,
        format=near,
        batch=batch,
    )
    cases = [one, replace(one, lookups=4, skew=steep)]
    probed(folder, quick)
    beside = 2**30 * (rows < 500_000_000)  # what a process needs, which is little beside 12 GiB
    limit = str(int(12 * 2**30 * rows / 1e9) + beside)
    with (
        group("memory", memory__limit_in_bytes=limit) as first,
        group("memory", memory__limit_in_bytes=limit) as second,
        standing([first], on_ssd, cases, folder) as ours,
        standing([second], mapped, cases, folder) as theirs,
    ):
        for number, (case, goal) in enumerate(zip(cases, (1.5, 2.0), strict=True)):
            taken = []
            for turn in range(WARM + count):
                (own, mine), (its, other) = ours(number), theirs(number)
                assert mine == other, "the two sides have other logits"
                if turn >= WARM:
                    taken.append((own, its))
            low, ratio, high = statistics.quantiles([its / own for own, its in taken], n=4)
            mine, other = (TURN * batch / statistics.median(of) for of in zip(*taken, strict=True))
            print(case)
            print(
                f"examples/s {mine:,.0f}, mapped file {other:,.0f}; ratio {ratio:.2f} ({low:.2f} to"
                f" {high:.2f})"
            )
            met = ratio >= goal
            print_target(f"over a mapped file, {case.lookups} ids", f"{ratio:.2f}", goal, met)
