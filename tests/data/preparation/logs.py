"""A small log of random values, its schema, and the parts read back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sparrow.features.schema import Column, Encoding, Schema


def written(folder: Path, columns: dict) -> Path:
    pq.write_table(pa.table(columns), folder / "log.parquet", row_group_size=300)
    return folder / "log.parquet"


def part(out: Path, name: str) -> pa.Table:
    return pq.read_table(out / name / "part-00000.parquet")


def log_of(rows: int, seed: int = 0) -> dict:
    rng = np.random.default_rng(seed)
    return {
        "label": np.arange(rows) % 2,
        "n": rng.normal(3, 2, rows),
        "code": rng.integers(10, 15, rows),
        "sparse_id": rng.integers(0, 1 << 40, rows),
        "row": np.arange(rows) / 2,
    }


SCHEMA = Schema(
    columns={
        "label": Column(kind="label"),
        "n": Column(kind="numeric"),
        "code": Column(kind="categorical", table="code"),
        "sparse_id": Column(kind="categorical", table="ids"),
        "row": Column(kind="numeric", transform="none"),
    },
    encodings={"code": Encoding(), "ids": Encoding(kind="hash")},
)
