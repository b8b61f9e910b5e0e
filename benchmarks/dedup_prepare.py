"""Putting sessions side by side: rows/s and memory against polars, and a log four times larger than
memory.

    python benchmarks/dedup_prepare.py           # about ten minutes, 8 GiB of disk, cgroup v1 and root
    python benchmarks/dedup_prepare.py --quick   # a small log, the same checks

The made log of `dedup_storage.py`, in the order of time and permuted. The job: Parquet in, rows by
hour, by the hash of their session and by time, Parquet out (lz4, row groups of 65,536). polars 2
does it with one sort, streaming; Sparrow with `in_time_order` and `clustered`, reading and writing
as `prepare` does. Each run is a process; its time is that of the job with what it imports; its
memory the largest resident set. Both outputs must have all rows, the sessions of an hour in one
stretch, and their rows in the order of time. Beside them the whole of `sparrow prepare` with a
group, which also types, fits and transforms. The large log is prepared, clustered and grouped, in a
memory control group.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from _peers.targets import print_target
from _peers.tiny import sized
from dedup_storage import HOUR_MS, MADE, made, prints
from prepare_memory import control_group

from sparrow.features.runs import begins
from sparrow.features.schema import Cluster

ROUNDS = 3
JOBS = ("polars", "sparrow", "sparrow prepare")  # of `_peers/sort_sessions.py`
SESSIONS = replace(MADE, cluster=Cluster(by="session"))


def timed(job: str, log: Path, work: Path) -> tuple[float, float]:
    """Seconds and MiB of a job in a process of its own."""
    program = [
        sys.executable,
        str(Path(__file__).parent / "_peers" / "sort_sessions.py"),
        job,
        str(log),
        str(work),
    ]
    found = subprocess.run(program, check=True, capture_output=True, text=True).stdout.split()
    return float(found[-2]), float(found[-1])


def numbers(path: Path) -> pa.Table:
    """A file's rows, with lists as `bits` takes them."""
    table = pq.read_table(path)
    lists = pa.large_list(pa.int64())
    kinds = [
        pa.field(f.name, lists if pa.types.is_nested(f.type) else f.type) for f in table.schema
    ]
    return table.cast(pa.schema(kinds))


def check(out: Path, want: np.ndarray) -> None:
    """All rows; the sessions of an hour in one stretch, each by time."""
    rows = numbers(next(out.rglob("part-*.parquet")))
    assert np.array_equal(prints(rows), want), "other rows"
    hour, session, ts = (
        rows["ts"].to_numpy() // HOUR_MS,
        rows["session"].to_numpy(),
        rows["ts"].to_numpy(),
    )
    first = begins([(hour, None), (session, None)], len(ts))
    assert (np.diff(hour) >= 0).all() and (first[1:] | (np.diff(ts) >= 0)).all(), "not in order"
    assert first.sum() == len(np.unique(hour * (session.max() + 1) + session)), (
        "a session in two stretches"
    )


def against_polars(log: Path, name: str, work: Path, rounds: int) -> None:
    """All jobs in turn."""
    rows = pq.read_metadata(log).num_rows
    want = prints(numbers(log))
    seconds: dict[str, list[float]] = {job: [] for job in JOBS}
    memory: dict[str, list[float]] = {job: [] for job in JOBS}
    for round_ in range(rounds):
        for job in JOBS:
            with tempfile.TemporaryDirectory(dir=work) as out:
                took, peak = timed(job, log, Path(out))
                seconds[job].append(took)
                memory[job].append(peak)
                if not round_ and job != "sparrow prepare":
                    check(Path(out), want)
    print(
        f"\n{name}: {rows:,} rows, {log.stat().st_size / 2**20:.0f} MiB of Parquet; {rounds} rounds"
    )
    print(f"{'job':<20}{'rows/s':>12}{'lowest':>12}{'highest':>12}{'MiB':>8}")
    for job in JOBS:
        speed = [rows / s for s in seconds[job]]
        most = max(memory[job])
        print(
            f"{job:<20}{statistics.median(speed):12,.0f}{min(speed):12,.0f}{max(speed):12,.0f}{most:8,.0f}"
        )
    pairs = [p / s for p, s in zip(seconds["polars"], seconds["sparrow"], strict=True)]
    less = max(memory["polars"]) / max(memory["sparrow"])
    spread = f"({min(pairs):.2f} to {max(pairs):.2f})"
    print(
        f"sparrow / polars: {statistics.median(pairs):.2f} times the rows/s {spread}, {less:.1f}"
        " times less memory"
    )


def beyond_memory(rows: int, limit: int, work: Path) -> None:
    """A log four times larger than the group's memory."""
    log = work / "large"
    log.mkdir()
    each, size = 250_000, 0
    for number in range(-(-rows // each)):
        made(each, work / "piece.parquet", seed=number)
        file = log / f"{number:03}.parquet"  # as numbers: packed, equal rows would make it small
        pq.write_table(
            pq.read_table(work / "piece.parquet"),
            file,
            1 << 14,
            use_dictionary=False,
            compression="none",
        )
        size += file.stat().st_size
    with control_group(limit) as group:
        enter = f'echo $$ > {group}/cgroup.procs && exec "$@"'
        program = [
            sys.executable,
            "-m",
            "sparrow",
            "prepare",
            str(log),
            "--schema",
            str(work / "schema.toml"),
        ]
        begin = time.perf_counter()
        done = subprocess.run(
            ["bash", "-c", enter, "bash", *program, "--out", str(work / "large-out")], check=False
        )
        took = time.perf_counter() - begin
        peak = int((group / "memory.max_usage_in_bytes").read_text())
    what = f"{size / 2**30:.2f} GiB of Parquet clustered and grouped within {limit / 2**30:.2f} GiB"
    if done.returncode:
        goal = "it ends well, 4 times the memory"
        print_target(what, f"ended with {done.returncode}", goal, False)
        sys.exit(1)
    manifest = json.loads((work / "large-out" / "manifest.json").read_text())
    count = sum(pq.read_metadata(path).num_rows for path in log.iterdir())
    assert sum(manifest["rows"].values()) == count, "rows were lost"
    runs = manifest["runs"]["train"]["user"]
    print(
        f"\n{count:,} rows in {took:.0f} s, {count / took:,.0f} rows/s, {count / runs:.2f} rows"
        " a run"
    )
    print(f"the group's peak {peak / 2**20:.0f} MiB, page cache included")
    met = size >= 4 * limit
    print_target(what, "it ended well", f"it does, {size / limit:.1f} times the memory", met)


def main() -> None:
    """Both orders, then the large log."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rows", type=int, default=1_000_000, help="of the log that polars sorts too"
    )
    parser.add_argument("--quick", action="store_true", help="50,000 rows, one round, no large log")
    parser.add_argument("--limit-mib", type=int, default=512, help="memory of the control group")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work, rows = Path(folder), sized(50_000, 600) if asked.quick else asked.rows
        (work / "schema.toml").write_text(SESSIONS.to_toml())
        made(rows, work / "log.parquet")
        table = pq.read_table(work / "log.parquet")
        order = np.random.default_rng(0).permutation(table.num_rows)
        pq.write_table(table.take(pa.array(order)), work / "permuted.parquet")
        del table
        for name in ("log", "permuted"):
            title = "in the order of time" if name == "log" else "permuted"
            against_polars(work / f"{name}.parquet", title, work, 1 if asked.quick else ROUNDS)
        if not asked.quick:
            beyond_memory(asked.limit_mib * 5000, asked.limit_mib << 20, work)


if __name__ == "__main__":
    main()
