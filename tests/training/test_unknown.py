"""What training makes of ids that it does not know."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparrow import data
from sparrow.features.schema import Column, Encoding, Schema, Split
from sparrow.training import train
from tests.data.preparation.test_moments import explored
from tests.runs import run_of


@pytest.mark.parametrize(
    "stored", [{}, {"format.name": "int8", "cache.fraction": 0.05, "cache.policy": "lfu"}], ids=str
)
def test_coin_flips_cannot_be_predicted(tmp_path: Path, stored: dict[str, Any]) -> None:
    """Not before they were trained on, nor later in time; with a vocabulary of the whole part AUC
    was 0.75.
    """
    pq.write_table(explored(20_000, 0), tmp_path / "log.parquet")
    data.prepare([tmp_path / "log.parquet"], tmp_path / "prepared")
    settings = {f"tables.{name}": value for name, value in stored.items()}
    results = train(run_of(tmp_path / "prepared", tmp_path / "run", **settings))
    assert bool(results["tables"]["hit_rate"]) == bool(stored)
    # 3,200 rows: 4 standard errors
    assert all(abs(window["auc"] - 0.5) < 0.04 for window in results["progressive"])
    assert abs(results["valid"]["auc"] - 0.5) < 0.05
    assert results["valid"]["ne"] < 1.02


def test_a_group_is_not_recognised_across_a_split_by_ratio(tmp_path: Path) -> None:
    """Rows tell nothing but which group they are of, and groups have rates of their own: with rows
    drawn one by one the AUC of valid was 0.8, as their groups had been trained on.
    """
    random = np.random.default_rng(0)
    group_N = np.repeat(np.arange(400), 20)
    label_N = random.random(len(group_N)) < np.where(random.random(400) < 0.5, 0.2, 0.8)[group_N]
    look_N = random.normal(size=400)[group_N]
    log = pa.table({"label": label_N.astype(int), "of": group_N, "id": group_N, "look": look_N})
    pq.write_table(log.take(pa.array(random.permutation(len(group_N)))), tmp_path / "log.parquet")
    kinds: dict[str, Any] = {"label": "label", "of": "group", "look": "numeric"}
    columns = {name: Column(kind=kind) for name, kind in kinds.items()}
    columns["id"] = Column(kind="categorical", table="id")
    schema = Schema(
        columns=columns,
        encodings={"id": Encoding(kind="range")},
        split=Split(by="ratio", valid=0.3),
    )
    data.prepare([tmp_path / "log.parquet"], tmp_path / "prepared", schema=schema)
    results = train(run_of(tmp_path / "prepared", tmp_path / "run", **{"loop.epochs": 4}))
    assert abs(results["valid"]["auc"] - 0.5) < 0.1  # 120 groups, of which a look says nothing
