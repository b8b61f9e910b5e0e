from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from sparrow import data
from sparrow.data.batches import parts
from sparrow.data.batches.dataset import Dataset
from tests.data.grouped import SCHEMA, made


@pytest.fixture(scope="session")
def grouped_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The log of `grouped.py`."""
    path = tmp_path_factory.mktemp("log") / "log.parquet"
    pq.write_table(made(), path)
    return path


@pytest.fixture
def grouped(grouped_log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Dataset:
    """The log of groups, prepared in many row groups."""
    monkeypatch.setattr(parts, "GROUP_ROWS", 64)
    data.prepare([grouped_log], tmp_path / "out", schema=SCHEMA)
    return data.open(tmp_path / "out")
