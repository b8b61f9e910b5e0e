from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparrow import data
from sparrow.data.batches import parts
from sparrow.data.batches.dataset import Dataset
from sparrow.features.schema import Column, Encoding, Schema, Split

ROWS = 1003
SCHEMA = Schema(
    columns={
        "label": Column(kind="label"),
        "row": Column(kind="numeric", transform="none"),
        "tags": Column(kind="list", table="tags"),
        "code": Column(kind="categorical", table="code"),
        "importance": Column(kind="weight"),
        "user": Column(kind="group"),
    },
    encodings={
        "tags": Encoding(kind="range", min_count=1, low=1, high=8),
        "code": Encoding(kind="range", min_count=1, low=0, high=ROWS),
    },
)


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """A prepared log of numbered rows, in row groups of 100."""
    folder = tmp_path_factory.mktemp("log")
    rng = np.random.default_rng(0)
    columns = {
        "label": np.arange(ROWS) % 2,
        "row": np.arange(ROWS, dtype=np.float64),
        "tags": [rng.integers(1, 9, n).tolist() for n in rng.integers(0, 4, ROWS)],
        "code": np.arange(ROWS),
        "importance": np.arange(ROWS) / 4,
        "user": np.arange(ROWS) // 5,
    }
    pq.write_table(pa.table(columns), folder / "log.parquet")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "GROUP_ROWS", 100)
        data.prepare(
            [folder / "log.parquet"], folder / "out", schema=SCHEMA, split=Split(valid=0, test=0)
        )
    return data.open(folder / "out")
