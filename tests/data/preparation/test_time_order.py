from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sparrow import data
from tests.data.grouped import SCHEMA, everything


def test_a_log_in_any_order_gives_the_same_folder(grouped_log: Path, tmp_path: Path) -> None:
    """Rows of one time keep the order of the log, so that only those are shuffled apart."""
    table = pq.read_table(grouped_log)
    times = np.unique(table["ts"].to_numpy())
    order = np.concatenate(
        [
            np.flatnonzero(table["ts"].to_numpy() == t)
            for t in np.random.default_rng(0).permutation(times)
        ]
    )
    pq.write_table(table.take(pa.array(order)), tmp_path / "log.parquet")
    for name, source in (("one", grouped_log), ("other", tmp_path / "log.parquet")):
        data.prepare([source], tmp_path / name, schema=SCHEMA)
    assert everything(data.open(tmp_path / "one")) == everything(data.open(tmp_path / "other"))
