"""Reading alone, divided among ranks: CPU time of each rank's share, and examples/s of the job,
given a core a rank.

    python benchmarks/readers.py          # about three minutes
    python benchmarks/readers.py --quick  # fewer rows, the same checks

The log is shaped like Criteo's: 13 numbers and 26 ids a row, prepared with row groups of 4,096
rows, as `prepare` makes them, and of 65,536. A rank is a process of one thread that reads two
epochs as rank r of W does, its batches built and dropped; the better one counts. Ranks run one
after another, so that each has a core and its CPU time is what it would be beside the others, but
for memory's bandwidth and the disk's; two of them are also run at once, where there are two cores.
Examples/s of W ranks: all rows over the CPU time of the slowest. First every batch is checked: the
ranks' rows together are the rows of one reader.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from _peers.targets import print_target
from _peers.tiny import sized

from sparrow import data
from sparrow.core import Batch
from sparrow.data.batches import parts
from sparrow.features.schema import Column, Encoding, Schema, Split

RANKS, GOAL = (1, 2, 4), 3.0


def made(out: Path, rows: int, group_rows: int) -> None:
    """A prepared log."""
    random, columns = np.random.default_rng(0), {"label": np.arange(rows) % 5 == 0}
    columns |= {f"number_{i}": random.lognormal(size=rows).astype(np.float32) for i in range(13)}
    columns |= {f"id_{i}": np.minimum(random.zipf(1.2, rows), 100_000) for i in range(26)}
    pq.write_table(pa.table(columns), out.with_suffix(".parquet"))
    kinds = {
        name: (
            Column(kind="numeric")
            if name.startswith("n")
            else Column(kind="categorical", table=name)
        )
        for name in columns
    }
    kinds["label"] = Column(kind="label")
    tables = {
        name: Encoding(kind="range", low=1, high=100_000)
        for name in columns
        if name.startswith("id")
    }
    parts.GROUP_ROWS, parts.GROUP_BYTES = group_rows, group_rows * 256
    schema = Schema(columns=kinds, encodings=tables)
    data.prepare([out.with_suffix(".parquet")], out, schema=schema, split=Split(valid=0, test=0))


def read(path: str, batch_size: int, shuffle: bool, rank: int, ranks: int) -> None:
    """What a rank's process does: prints its seconds of CPU and of wall time, and its rows."""
    torch.set_num_threads(1)
    pa.set_cpu_count(1)
    loader = data.open(path).loader(batch_size, shuffle=shuffle, rank=rank, ranks=ranks)
    found = []
    for _ in range(2):
        cpu, wall = time.process_time(), time.perf_counter()
        rows = sum(batch.batch_size for batch in loader)
        found.append((time.process_time() - cpu, time.perf_counter() - wall, rows))
    print(json.dumps(min(found)))


def started(*arguments: object) -> subprocess.Popen[str]:
    """A rank's process."""
    command = [sys.executable, "-W", "ignore", __file__, "--read", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str]) -> tuple[float, float, int]:
    """What it printed."""
    out, _ = process.communicate()
    assert process.returncode == 0, out
    return tuple(json.loads(out))


def check(path: Path, batch_size: int, shuffle: bool) -> None:
    """The rows of every batch, whatever the number of readers."""

    def prints(batches: list[Batch]) -> list[list[float]]:
        rows = [
            torch.cat([b.dense_BC.double(), b.ids.values_N.view(26, -1).T.double()], 1)
            for b in batches
        ]
        return sorted(torch.cat(rows).tolist())

    dataset = data.open(path)
    for ranks in RANKS[1:]:
        readers = [
            dataset.loader(batch_size, shuffle=shuffle, rank=r, ranks=ranks) for r in range(ranks)
        ]
        together = zip(dataset.loader(batch_size, shuffle=shuffle), *readers, strict=True)
        for number, (whole, *mine) in enumerate(together):
            assert sum(one.batch_size for one in mine) == whole.batch_size
            if number % 16 == 0:
                assert prints(mine) == prints([whole])


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--read", nargs=5)
    given = parser.parse_args()
    if given.read:
        path, *numbers = given.read
        batch_size, shuffle, rank, ranks = map(int, numbers)
        read(path, batch_size, bool(shuffle), rank, ranks)
        return
    gains: dict[str, float] = {}
    rows = sized(1 << 18, 1 << 12) if given.quick else 1 << 20
    with tempfile.TemporaryDirectory() as folder:
        logs = {size: Path(folder) / f"log-{size}" for size in (4096, 65536)}
        for size, path in logs.items():
            made(path, rows, size)
            bytes_row = sum(f.stat().st_size for f in (path / "train").iterdir()) / rows
            print(f"row groups of {size:6} rows: {bytes_row:.1f} bytes a row")
        check(logs[4096], 16384, False)
        check(logs[4096], 16384, True)
        print(
            "row group  batch shuffle   CPU ns for each row of the log, slowest rank of 1, 2, 4  "
            " times"
        )
        for size, path in logs.items():
            for batch_size in (4096, 16384):
                for shuffle in (False, True):
                    cpu = [
                        max(
                            ended(started(path, batch_size, int(shuffle), r, ranks))[0]
                            for r in range(ranks)
                        )
                        for ranks in RANKS
                    ]
                    shown = "  ".join(f"{1e9 * s / rows:7.0f}" for s in cpu)
                    times = ", ".join(f"{cpu[0] / s:.2f}" for s in cpu[1:])
                    print(f"{size:9} {batch_size:6} {shuffle!s:>7}   {shown}   {times}", flush=True)
                    if (size, batch_size) == (4096, 16384):
                        gains["shuffled" if shuffle else "in order"] = cpu[0] / cpu[-1]
        alone = ended(started(logs[4096], 16384, 0, 0, 1))[1]
        two = [started(logs[4096], 16384, 0, r, 2) for r in range(2)]
        wall = max(ended(process)[1] for process in two)
        speeds = f"{rows / alone:,.0f} examples/s alone, {rows / wall:,.0f} together"
        print(f"two at once, in order, batch 16384: {speeds} ({alone / wall:.2f} times)")
    for order, gain in gains.items():
        claim = f"reading {order}, 4 ranks with a core each"
        print_target(claim, f"{gain:.2f} times one rank's examples/s", GOAL, gain >= GOAL)


if __name__ == "__main__":
    main()
