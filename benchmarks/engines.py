"""Engines that could feed `sparrow prepare`, on one log: time, memory, order, manners
(notes/decisions/0003).

Runs what the environment has of pyarrow (needed: it writes the log), polars and daft. "buckets" is
pyarrow that sorts through files of one range of times each. Needs Linux; limits need cgroup v1 and
root; without, none is set.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.ipc as ipc
import pyarrow.parquet as pq

# I1: the row's number
NUMBERS, IDS = ["time", *(f"I{i}" for i in range(1, 14))], [f"C{i}" for i in range(1, 27)]
SCHEMA = pa.schema([(name, pa.int64()) for name in NUMBERS] + [(name, pa.string()) for name in IDS])
GROUPS, BUCKETS = Path("/sys/fs/cgroup/memory"), 16


def read(path: Path, names: list[str]) -> Iterator[pa.RecordBatch]:
    """pyarrow's batches, with small blocks and no read-ahead of whole row groups."""
    if path.suffix == ".parquet":
        return pq.ParquetFile(path, pre_buffer=False, buffer_size=1 << 16).iter_batches(
            1 << 16, columns=names
        )
    convert = pacsv.ConvertOptions(column_types=SCHEMA, include_columns=names)
    return iter(
        pacsv.open_csv(path, pacsv.ReadOptions(block_size=1 << 21), convert_options=convert)
    )


def sort_in_buckets(path: Path) -> Iterator[pa.RecordBatch]:
    """Rows stably by time: cut the times evenly, write each range to a file, sort each file in
    memory.
    """
    t_N = np.concatenate([batch.column("time").to_numpy() for batch in read(path, ["time"])])
    cuts = np.quantile(t_N, np.linspace(0, 1, BUCKETS + 1)[1:-1], method="lower")
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        options = ipc.IpcWriteOptions(compression="lz4")
        writers = [ipc.new_file(f"{folder}/{i}", SCHEMA, options=options) for i in range(BUCKETS)]
        for batch in read(path, SCHEMA.names):
            bucket_N = np.searchsorted(cuts, batch.column("time").to_numpy(), side="right")
            batch, start = batch.take(pa.array(np.argsort(bucket_N, kind="stable"))), 0
            for writer, count in zip(
                writers, np.bincount(bucket_N, minlength=BUCKETS).tolist(), strict=True
            ):
                writer.write(batch.slice(start, count))
                start += count
        for i, writer in enumerate(writers):
            writer.close()
            with pa.memory_map(f"{folder}/{i}") as part:
                yield from ipc.open_file(part).read_all().sort_by("time").to_batches(1 << 16)


def batches(engine: str, path: Path, sort: bool) -> Iterator[pa.RecordBatch]:
    """The log as Arrow batches of some 10^4 rows with declared types, in file order or by time."""
    text = path.suffix != ".parquet"
    if engine == "buckets":
        yield from sort_in_buckets(path)
    elif engine == "pyarrow":
        found = read(path, SCHEMA.names)
        yield from (
            pa.Table.from_batches(found).sort_by("time").to_batches(1 << 16) if sort else found
        )
    elif engine == "polars":
        import polars as pl

        kinds = dict.fromkeys(NUMBERS, pl.Int64) | dict.fromkeys(IDS, pl.String)
        frame = pl.scan_csv(path, schema=kinds) if text else pl.scan_parquet(path)
        frame = frame.sort("time", maintain_order=True) if sort else frame
        for part in frame.collect_batches(
            chunk_size=1 << 16, maintain_order=True, engine="streaming"
        ):
            yield from part.to_arrow().to_batches()
    else:
        import daft

        daft.set_runner_native()
        types = dict.fromkeys(NUMBERS, daft.DataType.int64()) | dict.fromkeys(
            IDS, daft.DataType.string()
        )
        table = (
            daft.read_csv(str(path), infer_schema=False, schema=types)
            if text
            else daft.read_parquet(str(path))
        )
        yield from (table.sort("time") if sort else table).to_arrow_iter(results_buffer_size=1)


def child(engine: str, job: str, path: Path) -> None:
    """Do one job; print one JSON line: what came out, in which order (CRC of the row numbers), in
    which batches.
    """
    begin, rows, order, sizes, nulls, error = time.perf_counter(), 0, 0, 0, 0, ""
    try:
        if job == "import":
            __import__(engine)
        else:
            for batch in batches(engine, path, job == "sort"):
                nulls += sum(column.null_count for column in batch.columns)
                order = zlib.crc32(np.asarray(batch.column(SCHEMA.get_field_index("I1"))), order)
                sizes = zlib.crc32(b"%d," % batch.num_rows, sizes)
                rows += batch.num_rows
    except Exception as problem:
        error = f"{type(problem).__name__}: " + " ".join(str(problem).split())[:160]
    found = {
        "s": time.perf_counter() - begin,
        "rows": rows,
        "nulls": nulls,
        "order": order,
        "sizes": sizes,
    }
    print(json.dumps(found | {"error": error}), flush=True)
    os._exit(0)  # engines' threads need not end


def run(engine: str, job: str, path: Path, limit_mib: int = 0) -> str:
    """One job in a process of its own, limited if asked: a line of the table."""
    group = groups() / f"engines-{os.getpid()}"  # one a program: two may run at once
    environment = os.environ | {"POLARS_MAX_THREADS": "2", "POLARS_TEMP_DIR": str(path.parent)}
    if limit_mib:
        group.mkdir(exist_ok=True)
        (group / "memory.limit_in_bytes").write_text(str(limit_mib << 20))
        environment |= {
            "POLARS_OOC_MEMORY_BUDGET_MB": str(limit_mib // 8),
            "DAFT_MEMORY_LIMIT": str(limit_mib << 20),
        }
    join = f"echo $$ > {group}/cgroup.procs && " if limit_mib else ""
    command = [
        "sh",
        "-c",
        join + 'exec "$@"',
        "sh",
        sys.executable,
        __file__,
        "--child",
        engine,
        job,
        str(path),
    ]
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    peak, begin = 0, time.perf_counter()
    while process.poll() is None and time.perf_counter() - begin < 300:
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        peak = max(
            [peak, *(int(line.split()[1]) >> 10 for line in lines if line.startswith("RssAnon"))]
        )
        time.sleep(0.02)
    process.kill()
    out = process.communicate()[0].splitlines()
    if limit_mib:
        group.rmdir()
    got = json.loads(out[-1]) if out else {"s": time.perf_counter() - begin, "error": "KILLED"}
    rest = " ".join(
        f"{key} {got[key]}" for key in ("rows", "nulls", "order", "sizes", "error") if got.get(key)
    )
    return (
        f"{engine:8} {job:6} {path.name:12} {limit_mib or '-':>5} {got['s']:6.1f} s {peak:5} MiB "
        f" {rest}"
    )


def groups() -> Path:
    """This process's memory control group; a folder that is not there when there is none to write
    in.
    """
    lines = Path("/proc/self/cgroup").read_text().splitlines() if os.access(GROUPS, os.W_OK) else []
    return GROUPS / next(
        (line.split(":", 2)[2].lstrip("/") for line in lines if ":memory:" in line), "none"
    )


def write_log(folder: Path, rows: int) -> None:
    """The same rows as log.csv and log.parquet: ids of 100,000 words, times shuffled and in
    threes.
    """
    random, files = np.random.default_rng(0), (folder / "log.csv", folder / "log.parquet")
    times = random.permutation(rows) // 3
    words = pa.array([f"{i * 2654435761 % 2**32:08x}" for i in range(100_000)])
    with pacsv.CSVWriter(files[0], SCHEMA) as text, pq.ParquetWriter(files[1], SCHEMA) as packed:
        for start in range(0, rows, 1 << 20):
            t_N = times[start : start + (1 << 20)]
            numbers = [random.integers(0, 1000, len(t_N)) for _ in NUMBERS[2:]]
            ids = [words.take(pa.array(random.integers(0, len(words), len(t_N)))) for _ in IDS]
            table = pa.table(
                [t_N, np.arange(start, start + len(t_N)), *numbers, *ids], schema=SCHEMA
            )
            text.write_table(table)
            packed.write_table(table)


def damaged(folder: Path) -> Iterator[Path]:
    """The log's first 100,000 rows with one fault in row 60,000, or without the last third of the
    packed file.
    """
    with (folder / "log.csv").open() as log:
        lines = [line for line, _ in zip(log, range(100_001), strict=False)]
    cells = lines[60_000].split(",")
    faults = {
        "short": [*cells[:-3], "x\n"],
        "long": ["7", *cells],
        "word": [*cells[:3], "ten", *cells[4:]],
    }
    for name, line in faults.items():
        (folder / f"{name}.csv").write_text(
            "".join([*lines[:60_000], ",".join(line), *lines[60_001:]])
        )
        yield folder / f"{name}.csv"
    packed = gzip.compress("".join(lines).encode(), 1)
    (folder / "cut.csv.gz").write_bytes(packed[: len(packed) * 2 // 3])
    yield folder / "cut.csv.gz"


def main() -> None:
    """Print the table, a line a run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="1/32 GiB, unlimited")
    parser.add_argument(
        "--gib", type=float, default=1.0, help="of log.csv; the limit is half as much"
    )
    parser.add_argument("--folder", help="where the log and what engines spill go")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        return child(asked.child[0], asked.child[1], Path(asked.child[2]))
    engines = [name for name in ("pyarrow", "polars", "daft") if importlib.util.find_spec(name)]
    limits = [0, int(512 * asked.gib)] if groups().is_dir() and not asked.quick else [0]
    with tempfile.TemporaryDirectory(dir=asked.folder) as name:
        folder = Path(name)
        write_log(folder, int((1 / 32 if asked.quick else asked.gib) * (1 << 30) / 345))
        print(
            "engine, job, file (MiB:",
            {f.name: f.stat().st_size >> 20 for f in folder.iterdir()},
            end="), ",
        )
        print("limit MiB, seconds, peak of anonymous memory, what came out")
        logs = [folder / "log.csv", folder / "log.parquet"]
        for engine in engines:
            print(run(engine, "import", folder), flush=True)
        for job, most, log in [
            (j, m, log) for j in ("stream", "sort") for m in limits for log in logs
        ]:
            for engine in [*engines, *(["buckets"] if job == "sort" else [])]:
                print(run(engine, job, log, most), flush=True)
        for log in damaged(folder):
            for engine in engines:
                print(run(engine, "stream", log), flush=True)


if __name__ == "__main__":
    main()
