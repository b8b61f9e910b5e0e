"""One job of `dedup_prepare.py` in a process that loads nothing else: JOB LOG OUT; prints seconds
and MiB.

polars packs columns in dictionaries as it writes, Sparrow does not, as in a prepared log.
"""

from __future__ import annotations

import re
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

HOUR_MS, GROUP_ROWS = 3_600_000, 1 << 16


def sorted_by_polars(log: Path, out: Path) -> None:
    """One sort, streaming."""
    import polars as pl

    frame = pl.scan_parquet(log).sort(
        [pl.col("ts") // HOUR_MS, pl.col("session").hash(), pl.col("session"), pl.col("ts")],
        maintain_order=True,
    )
    frame.sink_parquet(out / "part-00000.parquet", compression="lz4", row_group_size=GROUP_ROWS)


def sorted_by_sparrow(log: Path, out: Path) -> None:
    """As `prepare` does it, of rows that are numbers already."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    from sparrow.core.prefetch import prefetch
    from sparrow.data.batches.parts import PartWriter
    from sparrow.data.preparation.sessions import clustered
    from sparrow.data.preparation.time_order import in_time_order
    from sparrow.features.quantile import Ordered
    from sparrow.features.schema import Schema

    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        times, in_order, last = Ordered(Path(folder) / "times", np.int64), True, 0
        for batch in pq.ParquetFile(log).iter_batches(GROUP_ROWS, columns=["ts"]):
            t_N = batch.column("ts").to_numpy()
            in_order &= bool(t_N[0] >= last and (np.diff(t_N) >= 0).all())
            last = int(t_N[-1])
            times.add(t_N)
        lists, schema = pa.large_list(pa.int64()), pq.read_schema(log)
        kinds = pa.schema(
            [pa.field(f.name, lists if pa.types.is_nested(f.type) else f.type) for f in schema]
        )
        rows: Iterator[tuple[int, pa.Table]] = (
            (0, pa.table(batch).cast(kinds)) for batch in pq.ParquetFile(log).iter_batches(8192)
        )
        rows = prefetch(rows)
        if not in_order:
            rows = in_time_order(rows, times, "ts", Path(folder))
        writer = PartWriter(out / "train", Schema(columns={}))
        for _, table in clustered(rows, "session", "ts", HOUR_MS, Path(folder)):
            writer.add(table)
        writer.close(is_complete=True)


def prepared(log: Path, out: Path) -> None:
    """The whole of prepare."""
    from sparrow import data
    from sparrow.features.schema import Schema

    data.prepare([log], out / "out", schema=Schema.load(log.parent / "schema.toml"))


JOBS = {"polars": sorted_by_polars, "sparrow": sorted_by_sparrow, "sparrow prepare": prepared}


if __name__ == "__main__":
    begin = time.perf_counter()
    JOBS[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
    took = time.perf_counter() - begin
    (peak,) = re.findall(
        r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text()
    )  # of this program, not of who began it
    print(took, int(peak) / 1024)
