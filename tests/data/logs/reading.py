"""Files written and logs read whole, for the tests of this folder."""

from __future__ import annotations

import gzip
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from sparrow.data.logs.read import Log, open_log
from sparrow.data.meaning.inference import infer
from sparrow.features.schema import Schema


def write(path: Path, text: str) -> Path:
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def rows(*inputs: Path | str) -> list[dict]:
    log = open_log(inputs)
    return pa.Table.from_batches(log.batches(log.types)).to_pylist()


def rows_of(log: Log) -> list[dict]:
    return pa.Table.from_batches(log.batches(log.types)).to_pylist()


def inferred(folder: Path, columns: dict, label: str | None = None) -> Schema:
    pq.write_table(pa.table(columns), folder / "log.parquet")
    return infer([folder / "log.parquet"], label)
