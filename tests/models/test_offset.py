"""Where the predictions of every model begin: at the training rows' base rate of each label."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from sparrow import data
from sparrow.core import Batch, KeyedJagged, UserError
from sparrow.features.schema import Column, Encoding, Schema, Split
from sparrow.layers.precision import Precision
from sparrow.metrics import evaluate_labels
from sparrow.trained.run import Data, Loop, Run
from sparrow.training import Trainer, train
from tests.models.test_models import EACH, MODELS, SCHEMA, named

BOTH = dataclasses.replace(SCHEMA, columns={**SCHEMA.columns, "buy": Column(kind="label")})
RATES = {"click": 0.008, "buy": 0.3}
ROWS = 6000


def raw(rates: dict[str, float] = RATES, weights: bool = False) -> pa.Table:
    """Rows whose columns say nothing of the labels; with weights ones count three times."""
    random = np.random.default_rng(0)
    columns: dict[str, Any] = {
        "price": random.normal(size=ROWS),
        "age": random.normal(size=ROWS),
        "item": random.integers(0, 20, ROWS),
        "user": random.integers(0, 20, ROWS),
        "history": [random.integers(0, 20, random.integers(0, 4)).tolist() for _ in range(ROWS)],
    }
    for name, rate in rates.items():
        columns[name] = random.permutation(np.arange(ROWS) < round(rate * ROWS)).astype(np.int64)
    if weights:
        columns["weight"] = np.where(columns["click"] == 1, 3.0, 1.0)
    return pa.table(columns)


def prepared(folder: Path, table: pa.Table, schema: Schema = BOTH, **split: Any) -> Path:
    tables = {name: Encoding(kind="range") for name in schema.encodings}
    columns = schema.columns
    if "weight" in table.column_names:
        columns = {**columns, "weight": Column(kind="weight")}
    splits = Split(**{"by": "ratio", "valid": 0.0, "test": 0.0, **split})
    pq.write_table(table, folder / "log.parquet")
    schema = dataclasses.replace(schema, columns=columns, encodings=tables, split=splits)
    return data.prepare([folder / "log.parquet"], folder / "prepared", schema=schema).out


@pytest.fixture(scope="module")
def rare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("rare"), raw())


def make(log: Path, run_dir: Path, **changes: Any) -> Run:
    return Run(run_dir=str(run_dir), data=Data(path=str(log), batch_size=64), threads=1, **changes)


def empty(schema: Schema) -> Batch:
    """An example whose numbers are 0 and whose ids are none."""
    lengths = torch.zeros(len(schema.sparse), dtype=torch.int64)
    ids = KeyedJagged(
        keys=schema.sparse, values_N=torch.zeros(0, dtype=torch.int64), lengths=lengths
    )
    return Batch(dense_BC=torch.zeros(1, len(schema.dense)), ids=ids)


@pytest.mark.parametrize(
    ("config", "precision"),
    [
        *((config, "fp32") for config in MODELS),
        *(pytest.param(*of.values, "bf16", marks=of.marks) for of in EACH),
    ],
    ids=lambda of: of if isinstance(of, str) else named(of),
)
def test_first_predictions_are_base_rates(
    rare: Path, tmp_path: Path, config: Any, precision: Any
) -> None:
    """Of a rare label and a frequent one, whatever the seed; exactly so for an example with nothing
    in it.
    """
    log = data.open(rare)
    for seed in range(3):
        trainer = Trainer(
            make(rare, tmp_path, model=config, seed=seed, precision=Precision(precision))
        )
        with torch.no_grad():
            found = evaluate_labels(trainer.evaluator.score, [log.first(ROWS)], range(2))
        # small models: a few random weights
        assert [one["ne"] for one in found] == pytest.approx([1, 1], abs=0.2)
        with torch.no_grad():
            logits_1T = trainer.job.model.eval()(empty(log.schema))
        torch.testing.assert_close(logits_1T[0], torch.tensor(log.log_odds()), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["dcnv2", "dlrm"])
def test_a_rare_labels_first_fifth_is_no_worse_than_its_rate(
    rare: Path, tmp_path: Path, name: str
) -> None:
    """The whole way through `train`, with all defaults."""
    found = train(
        Run.of(rare, {"run_dir": str(tmp_path), "model.name": name, "log.tensorboard": False})
    )
    assert found["progressive"][0]["ne"] == pytest.approx(1, abs=0.05)


def test_rates_are_of_the_rows_that_are_trained_on(tmp_path: Path) -> None:
    """Not of the negatives that are left out, nor of other parts; and by the weights that a loss
    gives them.
    """
    log = data.open(prepared(tmp_path, raw(weights=True), SCHEMA, negatives=0.1, valid=0.2))
    batch = log.first(log.rows())
    assert batch.labels_BT is not None and batch.weights_B is not None
    assert 0.05 < batch.labels_BT.mean() < 0.1
    ones = (batch.labels_BT[:, 0] * batch.weights_B).sum()
    odds = ones / (batch.weights_B.sum() - ones)
    assert log.log_odds() == pytest.approx([float(odds.log())], abs=0.02)


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_labels_that_are_all_alike_have_finite_log_odds(rare: Path, rate: float) -> None:
    log = data.open(rare)
    log = dataclasses.replace(
        log, manifest={**log.manifest, "base_rate": {"click": rate, "buy": 0.3}}
    )
    click, buy = log.log_odds()
    assert click == pytest.approx((2 * rate - 1) * math.log(2 * ROWS + 1))
    assert buy == pytest.approx(math.log(0.3 / 0.7), abs=1e-3)


def test_weights_of_nothing_are_no_rate(tmp_path: Path) -> None:
    """All weights 0, or those of the ones."""
    table = raw()
    for column in (np.zeros(ROWS), 1.0 - table["click"].to_numpy()):
        place = tmp_path / str(column.sum())
        place.mkdir()
        log = prepared(place, table.append_column("weight", pa.array(column)))
        assert all(map(math.isfinite, data.open(log).log_odds()))
        if not column.any():
            with pytest.raises(
                UserError, match="the weights of all 6,000 rows of the train part are 0"
            ):
                train(make(log, place / "run"))
            continue
        found = train(make(log, place / "run", loop=Loop(max_steps=3)))
        assert found["skipped_steps"] == 0
