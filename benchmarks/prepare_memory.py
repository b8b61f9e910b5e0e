"""`sparrow prepare` on a log larger than memory: 4 GiB of CSV in a memory control group of 1 GiB.

    python benchmarks/prepare_memory.py            # about ten minutes and 15 GiB of disk
    python benchmarks/prepare_memory.py --gib 0.2  # a small log, the same checks

13 numbers, 26 ids (three of up to ten million values), a time and a label; the rows are not in the
order of time, so that they have to be sorted too. One number is cut into exact quantile buckets,
every id gets a vocabulary. Swap does not help: what the group may use counts memory alone, and page
cache is part of it. Needs Linux, cgroup v1 and root.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pc
from _peers.targets import print_target

GROUPS = Path("/sys/fs/cgroup/memory")
CHUNK = 200_000
VOCABULARIES = np.geomspace(10, 10_000_000, 26).astype(int)


def write(path: Path, size: int, seed: int = 0) -> int:
    """A CSV file of at least so many bytes; returns its rows."""
    random, rows = np.random.default_rng(seed), 0
    with open(path, "wb") as file:
        writer = None
        while file.tell() < size:
            columns = {"label": (random.random(CHUNK) < 0.25).astype(np.int8)}
            columns["ts"] = 1_700_000_000 + random.integers(0, 10_000_000, CHUNK)
            columns |= {f"I{c}": np.round(random.standard_normal(CHUNK), 4) for c in range(1, 14)}
            for c, ids in enumerate(VOCABULARIES, 1):  # few ids are frequent, most are rare
                columns[f"C{c}"] = (
                    (ids * random.random(CHUNK) ** 4).astype(np.int64) * 2_654_435_761 % 2**32
                )
            table = pa.table(columns)
            writer = writer or pc.CSVWriter(file, table.schema)
            writer.write_table(table)
            rows += CHUNK
        if writer:
            writer.close()
    return rows


@contextmanager
def control_group(limit: int) -> Iterator[Path]:
    """A control group with so much memory, for processes that enter it by writing to its
    cgroup.procs.
    """
    if not os.access(GROUPS, os.W_OK):
        sys.exit(f"{GROUPS}: not there or not ours to write; this needs Linux, cgroup v1 and root")
    group = GROUPS / f"sparrow-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(limit))
        yield group
    finally:
        group.rmdir()


def main() -> None:
    """Write, prepare, check, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gib", type=float, default=4.0, help="size of the log (4)")
    parser.add_argument(
        "--limit-gib", type=float, default=1.0, help="memory of the control group (1)"
    )
    parser.add_argument("--folder", type=Path, help="where the log goes, on a disk with space")
    asked = parser.parse_args()
    limit = f"{asked.gib:g} GiB prepared within {asked.limit_gib:g} GiB of memory"
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        log, out = Path(folder) / "log.csv", Path(folder) / "out"
        rows = write(log, int(asked.gib * 2**30))
        size = log.stat().st_size
        schema = Path(folder) / "schema.toml"
        lines = ["[columns]", 'label = {kind = "label"}', 'ts = {kind = "time"}']
        lines += [f'I{c} = {{kind = "numeric"}}' for c in range(1, 13)]
        lines += ['I13 = {kind = "categorical", table = "I13", quantiles = 100}']
        lines += [f'C{c} = {{kind = "categorical", table = "C{c}"}}' for c in range(1, 27)]
        lines += ["[encodings]", "I13 = {}"]
        lines += [f'C{c} = {{kind = "vocabulary", min_count = 2}}' for c in range(1, 27)]
        schema.write_text("\n".join(lines) + "\n")
        with control_group(int(asked.limit_gib * 2**30)) as group:
            enter = f'echo $$ > {group}/cgroup.procs && exec "$@"'
            program = [
                sys.executable,
                "-m",
                "sparrow",
                "prepare",
                str(log),
                "--schema",
                str(schema),
                "--out",
                str(out),
            ]
            begin = time.perf_counter()
            done = subprocess.run(["bash", "-c", enter, "bash", *program], check=False)
            seconds = time.perf_counter() - begin
            failed = int((group / "memory.failcnt").read_text())
            peak = int((group / "memory.max_usage_in_bytes").read_text())
        if done.returncode:
            print_target(limit, f"ended with {done.returncode}", "it ends well", False)
            sys.exit(1)
        counted = json.loads((out / "manifest.json").read_text())["rows"]
        tables = tomllib.loads((out / "schema.toml").read_text())["encodings"]
        table_rows = sum(table["rows"] for table in tables.values())
        prepared = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    print(
        f"{size / 2**30:.2f} GiB of CSV, {rows:,} rows, prepared in {seconds:.0f} s"
        f" ({rows / seconds:,.0f} rows/s, {size / seconds / 1e6:.0f} MB/s) to"
        f" {prepared / 2**30:.2f} GiB; tables of {table_rows:,} rows"
    )
    print(
        f"the group's peak, page cache included: {peak / 2**20:.0f} MiB; it was at its limit"
        f" {failed:,} times"
    )
    met = sum(counted.values()) == rows
    print_target("rows in = rows out", f"{rows:,} and {sum(counted.values()):,}", "equal", met)
    print_target(limit, "ended well", "it ends well", True)


if __name__ == "__main__":
    main()
