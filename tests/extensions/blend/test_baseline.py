"""The logistic regression beside a run of another model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sparrow import data
from sparrow.analysis.parts import Alone
from sparrow.apps.report import report
from sparrow.extensions.blend import baseline
from sparrow.extensions.blend.baseline import evaluate_baseline, fit_baseline
from sparrow.metrics import ne
from sparrow.trained.run import Run
from sparrow.trained.scorer import restore
from sparrow.training import train
from tests.runs import small_run


def test_a_logistic_regression_stands_beside_other_models(prepared: Path, tmp_path: Path) -> None:
    """The same as a blend's part, on its rows; a large log has none."""
    run = small_run(prepared, tmp_path / "run")
    results, dataset = train(run), data.open(prepared)
    alone = Alone(restore(tmp_path / "run"), dataset)
    assert [*alone.scores("test")] == ["logistic regression"] and alone.compared == "model"
    (scores_N,) = alone.scores("valid").values()
    (batch,) = dataset.loader(1 << 20, split="valid")
    labels_N = batch.labels_BT[:, 0]
    # as a person gives it
    metrics = evaluate_baseline(replace(run, data=replace(run.data, batch_size=0)), results)
    assert metrics is not None and metrics["ne"] < 1
    assert metrics["ne"] == pytest.approx(float(ne(scores_N, labels_N)), abs=1e-5)
    as_blend = {
        "model.name": "blend",
        "model.trees": 0,
        "model.members": 1,
        "model.deep": (4,),
        "loop.max_steps": 1,
    }
    settings = {"data.batch_size": 256, "loop.evaluate_every": 1, "log.tensorboard": False}
    blend_run = Run.of(prepared, {"run_dir": str(tmp_path / "blend"), **as_blend, **settings})
    blend_results = train(blend_run)
    assert blend_results["best"]["parts"]["logistic"]["ne"] == pytest.approx(
        metrics["ne"], abs=1e-5
    )
    assert evaluate_baseline(blend_run, blend_results) is None
    assert evaluate_baseline(run, {**results, "stopped_by": "SIGINT"}) is None
    html = report(tmp_path / "run", rows=0).read_text(encoding="utf-8")
    assert (
        "test: logistic regression alone" in html
        and "logistic regression" in html.partition("test: ")[0]
    )


def test_the_baseline_has_layers_of_its_own(prepared: Path, tmp_path: Path) -> None:
    """It has no norm and no activation that settings of a model could change."""
    settings = {
        "model.name": "wukong",
        "loop.max_steps": 2,
        "layers.norm": "block",
        "layers.activation": "swish",
    }
    run = Run.of(prepared, {"run_dir": str(tmp_path / "run"), "log.tensorboard": False, **settings})
    assert evaluate_baseline(run, train(run)) is not None


def test_the_baseline_draws_nothing(prepared: Path) -> None:
    """Members that nobody asked for gave it an offset, by which its scores were rounded
    elsewhere.
    """
    dataset = data.open(prepared)
    (batch,) = dataset.loader(1 << 20, split="valid")
    scores = []
    for seed in range(3):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        score = fit_baseline(dataset)
        assert score is not None
        assert torch.equal(torch.get_rng_state(), before)
        scores.append(score(batch))
    assert torch.equal(scores[0], scores[1])
    assert torch.equal(scores[0], scores[2])


def test_a_large_log_has_no_baseline(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(baseline, "SMALL_ROWS", data.open(prepared).rows("train") - 1)
    run = small_run(prepared, tmp_path / "run")
    assert evaluate_baseline(run, train(run)) is None
    assert Alone(restore(tmp_path / "run"), data.open(prepared)).scores("test") == {}
