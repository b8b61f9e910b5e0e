"""The block store beside RocksDB: a part of tiers.py.

Both read past the page cache. RocksDB has 64 MiB of memory for blocks that were read, for its
indices and its filters; ours keeps none of what was read. A row of RocksDB has its number as its
key, in files of sorted blocks of 4 KiB with Bloom filters and without compression. Writing ends
when all rows are on the disk; what RocksDB compacts after that is not in its time, and the bytes of
it are told beside.
"""

from __future__ import annotations

import itertools
import shutil
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from _peers.targets import print_target
from tiers_blocks import (
    FIELDS,
    Rate,
    Reader,
    median,
    of_process,
    one_row_a_block,
    probed,
    record,
    timed,
)
from torch import Tensor

from sparrow.kernels.block_io import Blocks, Layout

THREADS = (1, 4, 8, 16, 32)
READS, TOGETHER = 40_000, 256  # rows of a turn; keys of a call
KEY = 8
CACHE = 64 << 20
PIECE = 1 << 16


def _packed(rows_U: Tensor) -> list[bytes]:
    """Returns the records of rows as bytes."""
    parts = [
        of.contiguous().view(len(rows_U), -1).view(torch.uint8).numpy()
        for of in record(rows_U).values()
    ]
    return [row.tobytes() for row in np.concatenate(parts, axis=1)]


def _keys(rows_N: Tensor) -> list[bytes]:
    return [row.to_bytes(KEY, "big") for row in rows_N.tolist()]


class RocksDb:
    """A table of records in RocksDB."""

    def __init__(self, path: Path, rows: int) -> None:
        import rocksdict

        self.kit, self.path = rocksdict, path
        options = rocksdict.Options(raw_mode=True)
        options.create_if_missing(True)
        options.set_use_direct_reads(True)
        options.set_use_direct_io_for_flush_and_compaction(True)
        options.set_compression_type(rocksdict.DBCompressionType.none())
        options.increase_parallelism(2)
        table = rocksdict.BlockBasedOptions()
        table.set_bloom_filter(10, False)
        table.set_block_size(4096)
        table.set_block_cache(rocksdict.Cache(CACHE))
        options.set_block_based_table_factory(table)
        self.open = rocksdict.Rdict(str(path), options)
        unlogged = rocksdict.WriteOptions()
        unlogged.disable_wal = True  # rows that left are safe with the next checkpoint, as ours
        self.open.set_write_options(unlogged)
        for first in range(0, rows, PIECE):
            self.put(torch.arange(first, min(first + PIECE, rows)))
        self.flush()
        self.compact()

    def put(self, rows_U: Tensor) -> None:
        """Write rows."""
        batch = self.kit.WriteBatch(raw_mode=True)
        for key, value in zip(_keys(rows_U), _packed(rows_U), strict=True):
            batch.put(key, value)
        self.open.write(batch)

    def flush(self) -> None:
        """Write what is in memory."""
        self.open.flush()

    def compact(self) -> None:
        """Merge files, so that no row is in two."""
        self.open.compact_range(None, None)

    def read(self, keys: Sequence[bytes], threads: int) -> list[bytes]:
        """Returns records, many keys of a call, in threads."""
        found: list[list[bytes]] = [[] for _ in range(threads)]
        step = -(-len(keys) // threads)

        def work(of: int) -> None:
            mine = keys[of * step : (of + 1) * step]
            for first in range(0, len(mine), TOGETHER):
                found[of] += self.open.get(mine[first : first + TOGETHER])

        workers = [threading.Thread(target=work, args=(of,)) for of in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return list(itertools.chain.from_iterable(found))

    @property
    def gigabytes(self) -> float:
        """Its files."""
        return sum(file.stat().st_size for file in self.path.iterdir()) / 1e9


def _per_row(work: Callable[[], object], count: int) -> tuple[Rate, float]:
    """Returns the rate of writing rows, and how many bytes were written for a byte of them."""
    before = of_process("write_bytes")
    rate = timed(work, count)
    return rate, (of_process("write_bytes") - before) / (
        count * Layout(fields=FIELDS, rows=0).record_bytes
    )


def run(folder: Path, quick: bool) -> None:
    """Print rows/s, CPU of a row, and bytes written of both. What is read is checked."""
    blocks, turns = (6_000, 2) if quick else (400_000, 5)
    rows, random = (
        blocks * Layout(fields=FIELDS, rows=0).per_block,
        torch.Generator().manual_seed(0),
    )
    layout = Layout(fields=FIELDS, rows=rows)
    probed(folder, quick)
    begun = time.perf_counter()
    with Blocks(folder / "blocks", layout, table="t") as ours:
        for first in range(0, rows, 1 << 18):
            rows_U = torch.arange(first, min(first + (1 << 18), rows))
            ours.put(rows_U, record(rows_U))
        ours.sync()
        print(
            f"{rows:,} rows, {layout.blocks * layout.block / 1e9:.2f} GB, made in"
            f" {time.perf_counter() - begun:.0f} s"
        )
        begun = time.perf_counter()
        theirs = RocksDb(folder / "rocksdb", rows)
        print(f"RocksDB: {theirs.gigabytes:.2f} GB, made in {time.perf_counter() - begun:.0f} s")
        reader = Reader(ours)
        checked = one_row_a_block(layout, 5_000, random)
        reader.read(checked, check=True)
        assert theirs.read(_keys(checked), 4) == _packed(checked), "RocksDB: other records"

        found: dict[str, list[Rate]] = {}
        for _ in range(turns):
            rows_N = one_row_a_block(layout, min(READS, layout.blocks), random)
            keys = _keys(rows_N)
            found.setdefault("Sparrow", []).append(
                timed(lambda r=rows_N: reader.read(r), len(rows_N))
            )
            for threads in THREADS:
                rate = timed(lambda k=keys, t=threads: theirs.read(k, t), len(keys))
                found.setdefault(f"RocksDB, {threads} threads", []).append(rate)
        for name, rates in found.items():
            print(f"  read {name:<20} {median(rates)}")
        best = max(
            found,
            key=lambda name: (
                statistics.median(r.per_s for r in found[name]) if "Rocks" in name else 0
            ),
        )
        pairs = list(zip(found["Sparrow"], found[best], strict=True))
        ratio = statistics.median(one.per_s / other.per_s for one, other in pairs)
        cpu = statistics.median(one.cpu_us / other.cpu_us for one, other in pairs)

        # all over the table, as rows that leave are
        rows_N = torch.randperm(rows, generator=random)[: rows // 20]
        parts = [part.sort()[0] for part in rows_N.split(4096)]

        def put() -> None:
            for part in parts:
                ours.put(part, record(part))
            ours.sync()

        def put_theirs() -> None:
            for part in parts:
                theirs.put(part)
            theirs.flush()

        for name, work in (("Sparrow", put), ("RocksDB", put_theirs)):
            wrote, factor = _per_row(work, len(rows_N))
            print(
                f"  write {name:<19} {median([wrote])}   {factor:.0f} bytes written for each byte"
                " of a row"
            )
        _, factor = _per_row(theirs.compact, len(rows_N))
        print(
            f"  and RocksDB, compacted after that: {factor:.0f} bytes more for each byte of a row"
        )
    shutil.rmtree(folder / "rocksdb")
    (folder / "blocks").unlink()
    print_target(f"rows/s over RocksDB's best ({best})", f"{ratio:.2f}", "1", ratio >= 1)
    print_target("CPU of a row over RocksDB's", f"{cpu:.2f}", "0.33", cpu <= 1 / 3)
