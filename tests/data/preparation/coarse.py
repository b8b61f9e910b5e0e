"""Small logs whose times tell days only."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

FIRST = datetime.date(2026, 3, 2)  # a Monday


def days_of(rows: int, days: int, seed: int = 0, **columns: Any) -> pa.Table:
    """Rows in the order of their days, each of which has about as many. columns: instead of these,
    or None.
    """
    random = np.random.default_rng(seed)
    at = np.sort(random.integers(0, days, rows))
    table = {
        "click": (random.random(rows) < 0.3).astype(np.int64),
        "user_id": random.integers(0, 40, rows),
        "item_id": random.integers(0, 30, rows),
        "price": random.random(rows),
        "ts": [FIRST + datetime.timedelta(days=int(day)) for day in at],
    }
    return pa.table(
        {name: values for name, values in (table | columns).items() if values is not None}
    )


def file_of(table: pa.Table, path: Path) -> Path:
    pq.write_table(table, path)
    return path
