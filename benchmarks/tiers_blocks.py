"""The block store alone, beside a bare io_uring loop over the same blocks: a part of tiers.py."""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from _peers.targets import print_target
from torch import Tensor

from sparrow.kernels.block_io import BlockMap, Blocks, Layout, Way
from sparrow.kernels.formats import Field

# 69 bytes
FIELDS = {
    "values": Field(width=16, across="cut"),
    "state": Field(),
    "bit": Field(dtype=torch.uint8),
}
# reads at a time of the bare loop; rows of a fetch, of which two are under way
DEPTH, BATCH = 16, 4096


@functools.cache
def _library() -> ctypes.CDLL:
    folder = tempfile.mkdtemp()
    source, library = Path(__file__).with_name("ring.c"), f"{folder}/ring.so"
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", str(source), "-o", library], check=True)
    found = ctypes.CDLL(library)
    pointer = ctypes.c_void_p
    found.read_blocks.argtypes = [
        ctypes.c_int,
        ctypes.c_int64,
        pointer,
        ctypes.c_int64,
        ctypes.c_int,
        pointer,
    ]
    return found


@dataclass(frozen=True)
class Rate:
    """What some reads took."""

    per_s: float
    cpu_us: float  # of all threads of this process, for each


def timed(work: Callable[[], object], count: int) -> Rate:
    """Of `count` reads that `work` does."""
    begin, cpu = time.perf_counter(), time.process_time()
    work()
    return Rate(count / (time.perf_counter() - begin), (time.process_time() - cpu) / count * 1e6)


def bare(
    blocks: Blocks, places_N: Tensor, depth: int = DEPTH, took_M: Tensor | None = None
) -> Rate:
    """Reads blocks of the file at some places, and does nothing with them.

    took_M: float64, for the seconds of each `depth` of them, which then are read together; by
    default in a flow.
    """
    fd, block = blocks.file.fd, blocks.layout.block
    took = None if took_M is None else took_M.data_ptr()

    def work() -> None:
        if code := _library().read_blocks(
            fd, block, places_N.data_ptr(), len(places_N), depth, took
        ):
            raise OSError(code, os.strerror(code))

    return timed(work, len(places_N))


def record(rows_U: Tensor) -> dict[str, Tensor]:
    """What row r holds: values made of r."""
    values_U16 = (rows_U[:, None] * 16 + torch.arange(16)).float()
    return {"values": values_U16, "state": rows_U.float(), "bit": (rows_U % 2).to(torch.uint8)}


class Reader:
    """Fetches rows, two fetches under way."""

    def __init__(self, blocks: Blocks) -> None:
        self.blocks = blocks
        self.into = [record(torch.zeros(BATCH, dtype=torch.int64)) for _ in range(2)]

    def read(self, rows_N: Tensor, check: bool = False) -> None:
        """Fetch rows, in ascending order within each batch."""
        batches = [part.sort()[0] for part in rows_N.split(BATCH)]
        tickets = {}
        for number, rows_U in enumerate([*batches, None]):
            if rows_U is not None:
                tickets[number] = self.blocks.fetch(
                    rows_U, self.into[number % 2], torch.arange(len(rows_U))
                )
            if number:
                never_U = self.blocks.wait(tickets.pop(number - 1))
                if check:
                    expected = record(batches[number - 1])
                    found = self.into[(number - 1) % 2]
                    assert not never_U.any()
                    assert all(
                        torch.equal(found[name][: len(never_U)], expected[name]) for name in FIELDS
                    )


@contextmanager
def filled(folder: Path, blocks: int, block: int) -> Iterator[tuple[Path, Layout, BlockMap]]:
    """A file of so many blocks, all written."""
    layout = Layout(fields=FIELDS, rows=0, block=block)
    layout = Layout(fields=FIELDS, rows=blocks * layout.per_block, block=block)
    path = folder / f"blocks{block}"
    path.unlink(missing_ok=True)
    try:
        with Blocks(path, layout, table="t") as made:
            for first in range(0, layout.rows, 1 << 18):
                rows_U = torch.arange(first, min(first + (1 << 18), layout.rows))
                made.put(rows_U, record(rows_U))
            map = made.sync()
        yield path, layout, map
    finally:
        path.unlink(missing_ok=True)


def one_row_a_block(layout: Layout, count: int, random: torch.Generator) -> Tensor:
    """Random rows of different blocks."""
    blocks_N = torch.randperm(layout.blocks, generator=random)[:count]
    return blocks_N * layout.per_block + torch.randint(layout.per_block, (count,), generator=random)


def probed(folder: Path, quick: bool) -> float:
    """Prints and returns how many random blocks of 4 KiB a second the device reads, at the best
    number at a time.
    """
    blocks = 5_000 if quick else 100_000
    with filled(folder, blocks, 4096) as (path, layout, map):
        rows_N = one_row_a_block(layout, blocks, torch.Generator().manual_seed(0))
        with Blocks(path, layout, table="t", map=map, is_written=False) as opened:
            places_N = map.places_K[rows_N // layout.per_block].contiguous()
            rate = max(bare(opened, places_N, depth).per_s for depth in (16, 32, 64))
    print(f"the device reads {rate:,.0f} blocks of 4 KiB a second, 16 to 64 at a time", flush=True)
    return rate


def of_process(name: str) -> int:
    """Returns a number that the kernel keeps of this process's reads and writes, such as
    "read_bytes".
    """
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(name)))


def median(rates: list[Rate]) -> str:
    """Reads/s and CPU of the median turn."""
    return (
        f"{statistics.median(r.per_s for r in rates):9,.0f}/s"
        f" {statistics.median(r.cpu_us for r in rates):6.2f} us"
    )


def reads(folder: Path, blocks: int, block: int, count: int, turns: int) -> dict[str, float]:
    """Prints reads/s of the bare loop and of each way, in turns. Returns the median ratio of each
    to the bare loop.
    """
    ways: tuple[Way, ...] = ("io_uring", "threads")
    random = torch.Generator().manual_seed(block)
    found: dict[str, list[Rate]] = {name: [] for name in ("bare", "bare, depth 32", *ways)}
    with filled(folder, blocks, block) as (path, layout, map):
        for turn in range(turns + 1):
            rows_N = one_row_a_block(layout, min(count, layout.blocks), random)
            rates = {}
            for way in ways:
                with Blocks(path, layout, table="t", map=map, way=way, is_written=False) as opened:
                    reader = Reader(opened)
                    if turn == 0:
                        reader.read(rows_N, check=True)
                        continue
                    rates[way] = timed(
                        lambda reader=reader, rows_N=rows_N: reader.read(rows_N), len(rows_N)
                    )
                    assert opened.counters["blocks_read"] == len(rows_N)
                    if way == "io_uring":
                        places_N = map.places_K[rows_N // layout.per_block].contiguous()
                        rates["bare"] = bare(opened, places_N)
                        rates["bare, depth 32"] = bare(opened, places_N, 32)
            for name, rate in rates.items():
                found[name].append(rate)
    ratios = {}
    for name, rates_T in found.items():
        pairs = sorted(
            mine.per_s / limit.per_s for mine, limit in zip(rates_T, found["bare"], strict=True)
        )
        ratios[name] = statistics.median(pairs)
        print(
            f"{block:>6} B {name:<15} {median(rates_T)}   {ratios[name]:.2f} ({pairs[0]:.2f} to"
            f" {pairs[-1]:.2f})"
        )
    return ratios


def writes(folder: Path, blocks: int, count: int, turns: int) -> None:
    """Prints how many rows/s are written back that lie at random. What was written is checked."""
    random = torch.Generator().manual_seed(1)
    found: dict[str, list[Rate]] = {"io_uring": [], "threads": []}
    with filled(folder, blocks, 4096) as (path, layout, map):
        for turn, way in itertools.product(range(turns + 1), found):
            with Blocks(path, layout, table="t", map=map, way=way) as opened:  # type: ignore[arg-type]
                rows_N = one_row_a_block(layout, min(count, layout.blocks // 2), random)
                batches = [(rows_U, record(rows_U)) for rows_U in rows_N.split(BATCH)]

                def put(
                    opened: Blocks = opened,
                    batches: list[tuple[Tensor, dict[str, Tensor]]] = batches,
                ) -> None:
                    for rows_U, fields in batches:
                        opened.put(rows_U, fields)
                    opened.sync()

                rate = timed(put, len(rows_N))
                counters = opened.counters
                assert counters["blocks_read"] == counters["blocks_written"] == len(rows_N)
                Reader(opened).read(rows_N, check=True)
                map = opened.sync()
            if turn:  # in the first, the file grows
                found[way].append(rate)
    for way, rates in found.items():
        print(
            f"  4096 B {way:<15} {median(rates)}   rows written back, one a block: a block read and"
            " one written each"
        )


def sequence(folder: Path, blocks: int) -> None:
    """Prints MB/s of rows that are put and read in their order."""
    layout = Layout(fields=FIELDS, rows=blocks * Layout(fields=FIELDS, rows=0).per_block)
    parts = [
        torch.arange(first, min(first + (1 << 18), layout.rows))
        for first in range(0, layout.rows, 1 << 18)
    ]
    into, at_U = record(torch.zeros(1 << 18, dtype=torch.int64)), torch.arange(1 << 18)
    for way in ("io_uring", "threads"):
        path = folder / "sequence"
        with Blocks(path, layout, table="t", way=way) as opened:  # type: ignore[arg-type]
            seconds = {"put": 0.0, "fetch": 0.0}
            for rows_U in parts:
                fields = record(rows_U)
                begin = time.perf_counter()
                opened.put(rows_U, fields)
                seconds["put"] += time.perf_counter() - begin
            begin = time.perf_counter()
            opened.sync()
            seconds["put"] += time.perf_counter() - begin
            for rows_U in parts:
                begin = time.perf_counter()
                opened.wait(opened.fetch(rows_U, into, at_U[: len(rows_U)]))
                seconds["fetch"] += time.perf_counter() - begin
            megabytes = layout.blocks * layout.block / 1e6
        path.unlink()
        rates = ", ".join(f"{name} {megabytes / s:,.0f} MB/s" for name, s in seconds.items())
        print(f"  4096 B {way:<15} rows in their order: {rates}")


def run(folder: Path, quick: bool) -> None:
    """Measure and print."""
    count, turns = (5_000, 3) if quick else (100_000, 5)
    sizes = (4096,) if quick else (512, 1024, 2048, 4096)
    blocks = 10_000 if quick else 500_000
    print(
        f"blocks of {FIELDS['values'].width} columns with their state, {blocks} of them in {folder}"
    )
    print(
        f"{'block':>8} {'reads':<15} {'median':>11} {'CPU each':>9}   of the bare loop (lowest to"
        " highest)"
    )
    for block in sizes:
        ratios = reads(folder, blocks, block, count, turns)
    writes(folder, blocks, count, turns)
    sequence(folder, blocks // 5)
    goal, equal = 0.85, ratios["io_uring"] / ratios["bare, depth 32"]
    # fetch itself has 32 reads under way
    for depth, ratio in ((16, ratios["io_uring"]), (32, equal)):
        met = ratio >= goal
        print_target(
            f"reads/s through fetch, of a bare loop at depth {depth}",
            f"{ratio:.2f}",
            goal,
            met,
        )
