from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sparrow import data
from sparrow.analysis import parts
from sparrow.analysis.report import report
from sparrow.analysis.scores import Rows, score_part
from sparrow.metrics import ne
from sparrow.models import blend
from sparrow.trained.run import Run
from sparrow.trained.scorer import restore
from sparrow.training import train
from tests.models.blend.test_blend import log, run
from tests.runs import small_run


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("blend")
    run(made, log(made, signal=1.5, rows=3000), **{"loop.epochs": 2, "loop.evaluate_every": 2})
    return made


def test_parts_alone_make_the_blend(place: Path) -> None:
    """The weighted mean of their logits is the blend's, row by row."""
    found, dataset = restore(place / "run"), data.open(place / "prepared")
    whole = score_part(found, dataset, "test", lambda *_: None)
    apart = parts.Alone(found, dataset).scores("test")
    assert len(apart) == 2 + blend.available()
    weights = [float(w) for w in found.model.model.weights_PT[:, 0]]
    logits = sum(w * torch.logit(p_N.double()) for w, p_N in zip(weights, apart.values(), strict=False))
    logits = logits + (1 - sum(weights)) * float(found.model.offset_T[0])
    torch.testing.assert_close(torch.sigmoid(logits), whole.scores_N.double(), atol=1e-5, rtol=1e-4)


def test_the_report_says_which_is_better(place: Path) -> None:
    html = report(place / "run", rows=0).read_text(encoding="utf-8")
    assert "test: logistic regression alone" in html and "valid: logistic regression alone" in html
    assert "no part of the blend is better alone" in html or "alone would be better: NE" in html


def test_words() -> None:
    """A part that knows more than the blend is named, and one that does not is not."""
    random = torch.Generator().manual_seed(0)
    truth_N = torch.rand(4000, generator=random)
    labels_N = (torch.rand(4000, generator=random) < truth_N).float()
    half_N = (truth_N + 0.5) / 2
    rows = Rows(scores_N=half_N, labels_N=labels_N, weights_N=None, sessions_N=None)
    told = parts.in_words("test", rows, {"boosted trees": truth_N, "logistic regression": torch.full((4000,), 0.5)})
    assert told.startswith("On test, boosted trees alone would be better: NE 0.7") and told.endswith(
        "below the blend's."
    )
    sign_N = torch.where(torch.arange(4000) % 2 > 0, 1.0, -1.0)
    sign_N[:8] = 1
    close_N = half_N + 0.002 * (labels_N - 0.5) * sign_N
    assert parts.in_words("test", rows, {"trees": close_N}).endswith("within the noise of these rows.")
    none = "On test, no part of the blend is better alone."
    assert parts.in_words("test", rows.by(truth_N), {"trees": half_N}) == none


def test_a_logistic_regression_stands_beside_other_models(prepared: Path, tmp_path: Path) -> None:
    """The same as a blend's part, on its rows; a large log has none."""
    run = small_run(prepared, tmp_path / "run")
    results, dataset = train(run), data.open(prepared)
    made = parts.Alone(restore(tmp_path / "run"), dataset)
    assert [*made.scores("test")] == ["logistic regression"] and made.whole == "model"
    (scores_N,) = made.scores("valid").values()
    (batch,) = dataset.loader(1 << 20, split="valid")
    labels_N = batch.labels_BT[:, 0]
    told = parts.beside(replace(run, data=replace(run.data, batch_size=0)), results)  # as a person gives it
    assert told["ne"] == pytest.approx(float(ne(scores_N, labels_N)), abs=1e-5) and told["ne"] < 1
    as_blend = {"model.name": "blend", "model.trees": 0, "model.members": 1, "model.deep": (4,), "loop.max_steps": 1}
    settings = {"data.batch_size": 256, "loop.evaluate_every": 1, "log.tensorboard": False}
    blend_run = Run.of(prepared, {"run_dir": str(tmp_path / "blend"), **as_blend, **settings})
    of_blend = train(blend_run)
    assert of_blend["best"]["parts"]["logistic"]["ne"] == pytest.approx(told["ne"], abs=1e-5)
    assert parts.beside(blend_run, of_blend) is None
    assert parts.beside(run, {**results, "stopped_by": "SIGINT"}) is None
    html = report(tmp_path / "run", rows=0).read_text(encoding="utf-8")
    assert "test: logistic regression alone" in html and "logistic regression" in html.partition("test: ")[0]


def test_the_baseline_has_layers_of_its_own(prepared: Path, tmp_path: Path) -> None:
    """It has no norm and no activation that settings of a model could change."""
    settings = {"model.name": "wukong", "loop.max_steps": 2, "layers.norm": "block", "layers.activation": "swish"}
    run = Run.of(prepared, {"run_dir": str(tmp_path / "run"), "log.tensorboard": False, **settings})
    assert parts.beside(run, train(run)) is not None


def test_the_baseline_does_not_depend_on_what_was_drawn(prepared: Path, tmp_path: Path) -> None:
    """Members that nobody asked for gave it an offset, by which its fit ended elsewhere."""
    dataset, found = data.open(prepared), []
    (batch,) = dataset.loader(1 << 20, split="valid")
    for seed in range(3):
        torch.manual_seed(seed)
        score = parts.baseline(small_run(prepared, tmp_path / "run"), dataset)
        assert score is not None
        found.append(score(batch))
    assert all(torch.allclose(scores_BT, found[0], rtol=0, atol=1e-5) for scores_BT in found)


def test_a_large_log_has_no_baseline(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "SMALL_ROWS", data.open(prepared).rows("train") - 1)
    run = small_run(prepared, tmp_path / "run")
    assert parts.beside(run, train(run)) is None
    assert parts.Alone(restore(tmp_path / "run"), data.open(prepared)).scores("test") == {}
