"""What scores pass through last: fitted to labels, saved as plain data, and never a turn of two scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import LogisticRegression

from sparrow import data
from sparrow.core import UserError
from sparrow.serving import load
from sparrow.serving.export import export
from sparrow.trained import calibrators
from sparrow.trained.calibrators import KINDS, isotonic, logistic
from sparrow.trained.run import Loop
from sparrow.trained.scorer import restore
from sparrow.training import train
from tests.runs import small_run

SOME = [kind for kind in get_args(KINDS) if kind != "none"]


@pytest.fixture(scope="module")
def run_dir(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run, which tests only read."""
    place = tmp_path_factory.mktemp("calibrators") / "run"
    train(small_run(prepared, place, loop=Loop(max_steps=3)))
    return place


def wrong(rows: int = 20_000) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scores whose log-odds are twice what they should be, plus one; labels and weights."""
    generator = torch.Generator().manual_seed(0)
    z_B = torch.randn(rows, generator=generator, dtype=torch.float64)
    labels_B = (torch.rand(rows, generator=generator) < torch.sigmoid(z_B)).double()
    weights_B = torch.rand(rows, generator=generator, dtype=torch.float64)
    return torch.sigmoid(2 * z_B + 1), labels_B, weights_B


def test_logistic_is_that_of_a_library() -> None:
    scores_B, labels_B, weights_B = wrong()
    found = logistic.fitted(scores_B, labels_B, weights_B)
    theirs = LogisticRegression(C=1e12, tol=1e-10).fit(torch.logit(scores_B)[:, None], labels_B, weights_B)
    assert found.slope == pytest.approx(theirs.coef_[0, 0], rel=1e-4)
    assert found.intercept == pytest.approx(theirs.intercept_[0], rel=1e-4)
    assert (found.slope, found.intercept) == pytest.approx((0.5, -0.5), abs=0.05)


def test_isotonic_is_that_of_a_library() -> None:
    scores_B, labels_B, _ = wrong(3000)
    found = isotonic.fitted(scores_B, labels_B, torch.ones(3000))
    theirs = IsotonicRegression(out_of_bounds="clip").fit(scores_B, labels_B)
    steps = theirs.predict(np.array(found.scores))
    inside = slice(1, -1)  # at the ends ours are neither 0 nor 1
    assert np.array(found.probabilities)[inside] == pytest.approx(steps[inside], abs=0.02)
    assert all(0 < p < 1 for p in found.probabilities)


@pytest.mark.parametrize("kind", SOME)
def test_wrong_scores_become_right_and_keep_their_order(kind: str) -> None:
    scores_B, labels_B, weights_B = wrong()
    (found,) = calibrators.fitted(kind, scores_B[:, None], labels_B[:, None], weights_B, ["label"])
    after_B = found(scores_B)
    means = [float(weights_B @ of) / float(weights_B.sum()) for of in (scores_B, after_B, labels_B)]
    assert abs(means[0] - means[2]) > 0.05 > 1e-3 > abs(means[1] - means[2])
    order = scores_B.argsort()
    assert bool((after_B[order].diff() >= 0).all())
    assert bool(((after_B > 0) & (after_B < 1)).all())
    assert found(torch.tensor([float("nan")])).isnan().all()


def test_rounding_does_not_halve_the_steps_of_logistic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Near the end a loss of many rows changes by its last bits alone, which took a hundred times as long."""
    evaluated, loss = [], logistic._loss
    monkeypatch.setattr(logistic, "_loss", lambda *given: evaluated.append(1) or loss(*given))
    generator = torch.Generator().manual_seed(0)
    scores_B = torch.sigmoid(torch.randn(50_000, generator=generator) - 3).double()
    labels_B = (torch.rand(50_000, generator=generator) < scores_B**1.2).double()
    logistic.fitted(scores_B, labels_B, torch.ones_like(scores_B))
    assert len(evaluated) < 50


@pytest.mark.parametrize("unit", [1.0, 0.01])
@pytest.mark.parametrize("ends", [(0, 1), (0, 0, 1), (0,)])
def test_one_row_at_an_end_does_not_move_all_others(ends: tuple[int, ...], unit: float) -> None:
    """The lowest row without a click stands alone where the next has one, and the highest with one likewise."""
    labels_B = (torch.rand(4000, generator=torch.Generator().manual_seed(3)) < 0.1).double()
    labels_B[: len(ends)] = torch.tensor(ends, dtype=torch.float64)
    scores_B, weights_B = torch.linspace(0.2, 0.4, 4000, dtype=torch.float64), torch.full((4000,), unit).double()
    for flip in (False, True):
        x_B, y_B = (1 - scores_B, 1 - labels_B) if flip else (scores_B, labels_B)
        found = isotonic.fitted(x_B, y_B, weights_B)
        assert float(found(x_B).mean()) == pytest.approx(float(y_B.mean()), abs=0.01)
        assert all(0 < p < 1 for p in found.probabilities)


@pytest.mark.parametrize("kind", SOME)
def test_rows_without_a_label_do_not_count(kind: str) -> None:
    scores_B, labels_B, weights_B = wrong(2000)
    want = calibrators.fitted(kind, scores_B[500:, None], labels_B[500:, None], weights_B[500:], ["label"])
    labels_B[:500] = float("nan")
    assert calibrators.fitted(kind, scores_B[:, None], labels_B[:, None], weights_B, ["label"]) == want


@pytest.mark.parametrize("kind", SOME)
def test_labels_that_scores_tell_apart_stay_within_0_and_1(kind: str) -> None:
    """The likelihood has no greatest value there."""
    scores_B = torch.linspace(0.01, 0.99, 100)
    (found,) = calibrators.fitted(kind, scores_B[:, None], (scores_B > 0.5).float()[:, None], None, ["label"])
    after_B = found(torch.linspace(0, 1, 1000))
    assert bool(((after_B >= 0) & (after_B <= 1)).all()) and bool((after_B.diff() >= 0).all())


@pytest.mark.parametrize("kind", SOME)
def test_right_scores_hardly_move(kind: str) -> None:
    """A control: what is right already has nothing to be fitted but noise."""
    generator = torch.Generator().manual_seed(1)
    scores_B = torch.rand(50_000, generator=generator)
    labels_B = (torch.rand(50_000, generator=generator) < scores_B).float()
    (found,) = calibrators.fitted(kind, scores_B[:, None], labels_B[:, None], None, ["label"])
    assert float((found(scores_B) - scores_B).abs().mean()) < 0.01


@pytest.mark.parametrize("kind", SOME)
def test_scores_that_tell_nothing_become_the_rate(kind: str) -> None:
    """A coin: every score becomes the share of clicks."""
    generator = torch.Generator().manual_seed(2)
    scores_B, labels_B = (
        torch.rand(20_000, generator=generator),
        (torch.rand(20_000, generator=generator) < 0.3).float(),
    )
    (found,) = calibrators.fitted(kind, scores_B[:, None], labels_B[:, None], None, ["label"])
    assert float((found(scores_B) - 0.3).abs().mean()) < 0.02


@pytest.mark.parametrize("kind", get_args(KINDS))
def test_a_served_model_passes_its_scores_through(
    kind: Any, run_dir: Path, prepared: Path, log: Path, tmp_path: Path
) -> None:
    """The folder reproduces them, and what the run says passed through the same."""
    export(run_dir, tmp_path / "model", [log], calibrate=kind)
    scorer, table = load(tmp_path / "model"), pq.read_table(log).slice(5800)
    expected = restore(run_dir).score_rows(table)[:, 0]
    for of in scorer.calibrators:
        expected = of(torch.from_numpy(expected)).numpy()
    rows = table.select(list(scorer.encoder.sources)).to_pylist()
    assert len(scorer.calibrators) == (kind != "none")
    assert np.abs(scorer.score(rows)[:, 0] - expected).max() <= 1e-6
    dataset = data.open(prepared)
    valid = next(iter(dataset.loader(dataset.rows("valid"), split="valid")))
    assert valid.labels_BT is not None
    rate, trained = float(valid.labels_BT.mean()), restore(run_dir).scores(valid)
    before, after = (abs(float(of.mean()) / rate - 1) for of in (trained, scorer.scores(valid)))
    assert after < min(before / 2, 0.03) or kind == "none"


def test_a_delta_is_calibrated_as_its_base(run_dir: Path, prepared: Path, log: Path, tmp_path: Path) -> None:
    """Unless told otherwise, and to the rows of its own model."""
    base = [tmp_path / "base"]
    export(run_dir, base[0], [log], calibrate="logistic")
    train(small_run(prepared, tmp_path / "next", loop=Loop(max_steps=3), init_from=str(run_dir)))
    export(tmp_path / "next", tmp_path / "delta", [log], base=base)
    export(tmp_path / "next", tmp_path / "plain", [log], base=base, calibrate="none")
    before, after = load(base[0]), load(base[0], [tmp_path / "delta"])
    assert calibrators.kind_of(after.calibrators) == "logistic"
    assert after.calibrators != before.calibrators
    assert load(base[0], [tmp_path / "plain"]).calibrators == ()


def test_a_file_that_is_not_of_the_folder_is_not_read(run_dir: Path, log: Path, tmp_path: Path) -> None:
    export(run_dir, tmp_path / "model", [log])
    calibrators.save([logistic.Config(slope=1.0, intercept=1e-7)], tmp_path / "model")
    assert load(tmp_path / "model").calibrators == ()


@pytest.mark.parametrize("kind", ["logistic", "isotonic"])
def test_rows_that_lack_a_label_are_not_fitted_to(kind: str) -> None:
    torch.manual_seed(0)
    scores, weights = torch.rand(400, 2), torch.rand(400) + 0.1
    labels = torch.bernoulli(scores.square())
    lacks = torch.rand(400) < 0.4
    labels[lacks, 1] = torch.nan
    both = calibrators.fitted(kind, scores, labels, weights, ["a", "b"])
    kept = [part[~lacks] for part in (scores, labels, weights)]
    assert both[1] == calibrators.fitted(kind, *kept, ["a", "b"])[1]
    assert both[0] == calibrators.fitted(kind, scores[:, :1], labels[:, :1], weights, ["a"])[0]


def test_what_cannot_be_fitted_or_read(tmp_path: Path) -> None:
    scores, ones = torch.rand(5, 1), torch.ones(5, 1)
    with pytest.raises(UserError, match="label 'click' is the same in all rows"):
        calibrators.fitted("logistic", scores, ones, None, ["click"])
    for text, why in (
        ('labels = [{ name = "cubic" }]', "cubic"),
        ('labels = [{ name = "logistic", slope = "steep" }]', "slope"),
        ('labels = [{ name = "isotonic", scores = [1.0, 0.0], probabilities = [0.0, 1.0] }]', "rise"),
        ('labels = [{ name = "isotonic", scores = [1.0], probabilities = [0.0, 1.0] }]', "other lengths"),
    ):
        (tmp_path / calibrators.FILE).write_text(text)
        with pytest.raises(UserError, match=why):
            calibrators.load(tmp_path)
