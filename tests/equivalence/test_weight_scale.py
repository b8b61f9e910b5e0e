"""The unit of sample weights decides nothing: in every model, loss, metric and calibrator, a
thousandth is the same.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor

from sparrow import data, metrics
from sparrow.core import Batch, KeyedJagged, UserError
from sparrow.core.config import Family
from sparrow.data.batches.parts import ROWS
from sparrow.extensions.calibration.fit import fit_calibrators
from sparrow.features.schema import Column, Schema
from sparrow.metrics.intervals import estimates
from sparrow.trained import calibrators
from sparrow.trained.calibrators import KINDS
from sparrow.trained.predict import predict
from sparrow.training import train
from tests.equivalence.test_default_settings import DRAWS, NAMES
from tests.equivalence.test_impressions import FAMILY, called, close, counted
from tests.runs import run_of

SCALES = (1e-3, 1.0, 1e3)
STEPS: dict[str, Any] = {"data.batch_size": 512, "loop.max_steps": 6}
LOSSES = Family("sparrow.losses")
NO_MEANS = {"topk", "auc_by_group"}  # they return a value for each group, and how much it weighs
# the blend among them: it alone fits parts that take sums of weights for counts
QUICK = {*DRAWS, "dlrm"}
EACH = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in NAMES]


def weighted(log: Path, place: Path, scale: float, **changes: Any) -> Path:
    """The log with weights of that unit, prepared. They hang on the label, so that a model that
    ignores them differs.

    changes: columns to be added.
    """
    table = pq.read_table(log)
    random = np.random.default_rng(3)
    weight_N = random.lognormal(0, 1, table.num_rows) * (1 + 4 * table["label"].to_numpy())
    table = table.append_column("sample_weight", pa.array(weight_N * scale))
    for name, values in changes.items():
        table = table.append_column(name, pa.array(values))
    raw, out = place / f"{scale}.parquet", place / f"{scale}"
    pq.write_table(table, raw)
    data.prepare([raw], out)
    return out


@pytest.fixture(scope="module")
def logs(log: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[float, Path]:
    place = tmp_path_factory.mktemp("weights")
    return {scale: weighted(log, place, scale) for scale in SCALES}


def weights_in(prepared: Path, part: str) -> np.ndarray:
    return pq.read_table(prepared / part / ROWS)["sample_weight"].to_numpy()


# -- preparation -----------------------------------------------------------------------------------


def test_weights_of_training_mean_one_and_have_the_bits_of_another_unit(
    logs: dict[float, Path],
) -> None:
    assert weights_in(logs[1.0], "train").mean(dtype=np.float64) == pytest.approx(1, abs=1e-6)
    for part in ("train", "valid", "test"):
        one, two, three = (weights_in(logs[scale], part) for scale in SCALES)
        assert one.dtype == np.float32 and one.std() > 0.5
        assert np.allclose(one, two, rtol=2e-7) and np.allclose(three, two, rtol=2e-7)
    means = [
        Schema.load(logs[scale] / "schema.toml").columns["sample_weight"].mean for scale in SCALES
    ]
    assert means == pytest.approx([means[1] * scale for scale in SCALES], rel=1e-12)


def test_weights_beside_impressions_mean_one_over_the_impressions(
    log: Path, tmp_path: Path
) -> None:
    """Then a row of n impressions is its n rows, weights and all."""
    table = pq.read_table(log)
    random = np.random.default_rng(1)
    shown_N = random.integers(1, 6, table.num_rows)
    table = table.append_column("shown", pa.array(shown_N))
    table = table.append_column("sample_weight", pa.array(random.random(table.num_rows) + 0.5))
    shares = {"label": "label", "impressions": "shown", "outcomes": ()}
    pq.write_table(table, tmp_path / "counts.parquet")
    data.prepare([tmp_path / "counts.parquet"], tmp_path / "counts", **shares)
    rows = pq.read_table(tmp_path / "counts" / "train" / ROWS)
    w_N, n_N = (rows[name].to_numpy().astype(np.float64) for name in ("sample_weight", "shown"))
    assert w_N @ n_N / n_N.sum() == pytest.approx(1, abs=1e-6)
    assert abs(w_N.mean() - 1) < 0.05


def test_another_days_weights_have_the_unit_of_the_first(log: Path, tmp_path: Path) -> None:
    """Its rows weigh what they weigh beside those that a model knows."""
    first = weighted(log, tmp_path, 1.0)
    schema = Schema.load(first / "schema.toml")
    table = pq.read_table(tmp_path / "1.0.parquet")
    heavy = pa.array(table["sample_weight"].to_numpy() * 2)
    at = table.schema.get_field_index("sample_weight")
    pq.write_table(table.set_column(at, "sample_weight", heavy), tmp_path / "next.parquet")
    data.prepare([tmp_path / "next.parquet"], tmp_path / "next", schema=schema)
    assert np.allclose(
        weights_in(tmp_path / "next", "train"), 2 * weights_in(first, "train"), rtol=2e-7
    )


def test_a_mean_of_one_keeps_weights_as_they_are(log: Path, tmp_path: Path) -> None:
    schema = Schema.load(weighted(log, tmp_path, 1e3) / "schema.toml")
    kept = dataclasses.replace(schema.columns["sample_weight"], mean=1.0)
    schema = dataclasses.replace(schema, columns={**schema.columns, "sample_weight": kept})
    data.prepare([tmp_path / "1000.0.parquet"], tmp_path / "kept", schema=schema)
    raw_N = (
        pq.read_table(tmp_path / "1000.0.parquet")["sample_weight"].to_numpy().astype(np.float32)
    )
    kept_N = np.concatenate(
        [weights_in(tmp_path / "kept", part) for part in ("train", "valid", "test")]
    )
    assert np.array_equal(np.sort(kept_N), np.sort(raw_N))


@pytest.mark.parametrize("mean", [0.0, -1.0, float("nan")])
def test_a_mean_that_cannot_be_is_refused(mean: float) -> None:
    with pytest.raises(UserError, match="mean"):
        Column(kind="weight", mean=mean)


# -- models ----------------------------------------------------------------------------------------


def scores(prepared: Path, raw: Path, place: Path, name: str) -> np.ndarray:
    train(run_of(prepared, place, **STEPS, **{"model.name": name}))
    predict(place, [raw], place / "scores.parquet")
    return pq.read_table(place / "scores.parquet")["score"].to_numpy()


@pytest.mark.parametrize("name", EACH)
def test_a_model_is_the_same_whatever_the_unit(
    log: Path, logs: dict[float, Path], tmp_path: Path, name: str
) -> None:
    """With its defaults."""
    one, two, three = (scores(logs[scale], log, tmp_path / f"{scale}", name) for scale in SCALES)
    assert two.std() > 1e-4
    assert np.allclose(one, two, atol=2e-4) and np.allclose(three, two, atol=2e-4)


def test_weights_count_at_all(
    log: Path, prepared: Path, logs: dict[float, Path], tmp_path: Path
) -> None:
    """Else the cases above would show nothing: ones weigh five times as much here."""
    with_weights = scores(logs[1.0], log, tmp_path / "with", "blend")
    without = scores(prepared, log, tmp_path / "without", "blend")
    assert with_weights.mean() > without.mean() + 0.1


# -- losses, metrics, calibrators ------------------------------------------------------------------


@pytest.mark.parametrize("name", LOSSES.names())
def test_a_loss_has_the_same_gradient_whatever_the_unit(name: str) -> None:
    """The loss itself may move by a constant: in `listwise` by the logarithm of the unit, as
    weights count rows.
    """
    grads = []
    for scale in SCALES:
        generator = torch.Generator().manual_seed(2)
        logits_BT = torch.randn(64, 1, generator=generator, requires_grad=True)
        batch = Batch(
            dense_BC=torch.zeros(64, 0),
            ids=KeyedJagged.from_lists({}),
            labels_BT=(torch.rand(64, 1, generator=generator) < 0.4).float(),
            weights_B=(torch.rand(64, generator=generator) + 0.1) * scale,
            session_B=torch.arange(64) // 8,
        )
        LOSSES.config(name)().build(["label"])(logits_BT, batch).backward()
        assert logits_BT.grad is not None
        grads.append(logits_BT.grad)
    assert float(grads[1].abs().max()) > 1e-3
    assert all(torch.allclose(grad, grads[1], rtol=1e-4, atol=1e-7) for grad in grads)


@pytest.mark.parametrize("name", [name for name in FAMILY if name not in NO_MEANS])
def test_a_metric_is_the_same_whatever_the_unit(name: str) -> None:
    rows, _ = counted(3)
    told = [
        called(getattr(metrics, name), {**rows, "weights": rows["weights"] * scale})
        for scale in SCALES
    ]
    assert close(told[0], told[1]) and close(told[2], told[1])
    assert not close(
        told[1], called(getattr(metrics, name), {**rows, "weights": rows["weights"] ** 3})
    )


@pytest.mark.parametrize("grouped", [False, True])
def test_an_interval_is_the_same_whatever_the_unit(grouped: bool) -> None:
    rows, _ = counted(3)
    groups = rows["groups"] if grouped else None
    told = [
        estimates(rows["scores"], rows["labels"], rows["weights"] * scale, groups)
        for scale in SCALES
    ]
    for metric, of in told[1].items():
        for other in (told[0][metric], told[2][metric]):
            assert close(of.value, other.value) and close(of.error, other.error), metric


@pytest.mark.parametrize("kind", [kind for kind in KINDS.__args__ if kind != "none"])  # type: ignore[attr-defined]
def test_a_calibrator_is_the_same_whatever_the_unit(kind: str) -> None:
    generator = torch.Generator().manual_seed(4)
    logits_B = torch.randn(4000, generator=generator, dtype=torch.float64)
    labels_B1 = (
        torch.rand(4000, 1, generator=generator) < torch.sigmoid(logits_B[:, None])
    ).double()
    weights_B = torch.rand(4000, generator=generator, dtype=torch.float64) + 0.1
    scores_B1 = torch.sigmoid(2 * logits_B + 1)[:, None]

    def calibrated(scale: float) -> Tensor:
        fitted = fit_calibrators(kind, scores_B1, labels_B1, weights_B * scale, ["label"])
        return calibrators.passed(scores_B1, fitted)

    one, two, three = map(calibrated, SCALES)
    assert not torch.allclose(two, scores_B1, atol=0.05)
    assert torch.allclose(one, two, atol=1e-8) and torch.allclose(three, two, atol=1e-8)
