"""What scores pass through last: fitted to labels, saved as plain data, and never a turn of two
scores.
"""

from __future__ import annotations

import json
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
from sparrow.extensions.calibration import isotonic, logistic
from sparrow.extensions.calibration.fit import WorseError, fit_calibrators
from sparrow.features.schema import Split
from sparrow.features.transforms import Transforms
from sparrow.serving import Scorer, load
from sparrow.serving.export import export
from sparrow.trained import calibrator_files, calibrators
from sparrow.trained.calibrators import KINDS
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
    found = logistic.fit_config(scores_B, labels_B, weights_B)
    clicks, others = float(weights_B @ labels_B), float(weights_B @ (1 - labels_B))
    # each row is both, in parts
    targets_B = torch.where(labels_B == 1, (clicks + 1) / (clicks + 2), 1 / (others + 2))
    both_B = torch.cat([torch.ones_like(labels_B), torch.zeros_like(labels_B)])
    parts_B = torch.cat([weights_B * targets_B, weights_B * (1 - targets_B)])
    theirs = LogisticRegression(C=1e12, tol=1e-10).fit(
        torch.logit(scores_B).repeat(2)[:, None], both_B, parts_B
    )
    assert found.slope == pytest.approx(theirs.coef_[0, 0], rel=1e-4)
    assert found.intercept == pytest.approx(theirs.intercept_[0], rel=1e-4)
    assert (found.slope, found.intercept) == pytest.approx((0.5, -0.5), abs=0.05)


def test_isotonic_is_that_of_a_library() -> None:
    scores_B, labels_B, _ = wrong(3000)
    found = isotonic.fit_config(scores_B, labels_B, torch.ones(3000))
    theirs = IsotonicRegression(out_of_bounds="clip").fit(scores_B, labels_B)
    steps = theirs.predict(np.array(found.scores))
    inside = slice(1, -1)  # at the ends ours are neither 0 nor 1
    assert np.array(found.probabilities)[inside] == pytest.approx(steps[inside], abs=0.02)
    assert all(0 < p < 1 for p in found.probabilities)


@pytest.mark.parametrize("kind", SOME)
def test_wrong_scores_become_right_and_keep_their_order(kind: str) -> None:
    scores_B, labels_B, weights_B = wrong()
    (found,) = fit_calibrators(kind, scores_B[:, None], labels_B[:, None], weights_B, ["label"])
    after_B = found(scores_B)
    means = [float(weights_B @ of) / float(weights_B.sum()) for of in (scores_B, after_B, labels_B)]
    assert abs(means[0] - means[2]) > 0.05 > 1e-3 > abs(means[1] - means[2])
    order = scores_B.argsort()
    assert bool((after_B[order].diff() >= 0).all())
    assert bool(((after_B > 0) & (after_B < 1)).all())
    assert found(torch.tensor([float("nan")])).isnan().all()


def test_rounding_does_not_halve_the_steps_of_logistic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Near the end a loss of many rows changes by its last bits alone, which took a hundred times
    as long.
    """
    evaluated, loss = [], logistic._loss
    monkeypatch.setattr(logistic, "_loss", lambda *given: evaluated.append(1) or loss(*given))
    generator = torch.Generator().manual_seed(0)
    scores_B = torch.sigmoid(torch.randn(50_000, generator=generator) - 3).double()
    labels_B = (torch.rand(50_000, generator=generator) < scores_B**1.2).double()
    logistic.fit_config(scores_B, labels_B, torch.ones_like(scores_B))
    assert len(evaluated) < 50


@pytest.mark.parametrize("unit", [1.0, 0.01])
@pytest.mark.parametrize("ends", [(0, 1), (0, 0, 1), (0,)])
def test_one_row_at_an_end_does_not_move_all_others(ends: tuple[int, ...], unit: float) -> None:
    """The lowest row without a click stands alone where the next has one, and the highest with one
    likewise.
    """
    labels_B = (torch.rand(4000, generator=torch.Generator().manual_seed(3)) < 0.1).double()
    labels_B[: len(ends)] = torch.tensor(ends, dtype=torch.float64)
    scores_B, weights_B = (
        torch.linspace(0.2, 0.4, 4000, dtype=torch.float64),
        torch.full((4000,), unit).double(),
    )
    for flip in (False, True):
        x_B, y_B = (1 - scores_B, 1 - labels_B) if flip else (scores_B, labels_B)
        (found,) = fit_calibrators("isotonic", x_B[:, None], y_B[:, None], weights_B, ["label"])
        assert float(found(x_B).mean()) == pytest.approx(float(y_B.mean()), abs=0.01)
        assert all(0 < p < 1 for p in found.probabilities)


@pytest.mark.parametrize("kind", SOME)
def test_rows_without_a_label_do_not_count(kind: str) -> None:
    scores_B, labels_B, weights_B = wrong(2000)
    want = fit_calibrators(
        kind, scores_B[500:, None], labels_B[500:, None], weights_B[500:], ["label"]
    )
    labels_B[:500] = float("nan")
    assert fit_calibrators(kind, scores_B[:, None], labels_B[:, None], weights_B, ["label"]) == want


@pytest.mark.parametrize("kind", SOME)
def test_labels_that_scores_tell_apart_stay_within_0_and_1(kind: str) -> None:
    """The likelihood has no greatest value there."""
    scores_B = torch.linspace(0.01, 0.99, 100)
    (found,) = fit_calibrators(
        kind, scores_B[:, None], (scores_B > 0.5).float()[:, None], None, ["label"]
    )
    after_B = found(torch.linspace(0, 1, 1000))
    assert bool(((after_B >= 0) & (after_B <= 1)).all()) and bool((after_B.diff() >= 0).all())


def test_right_scores_hardly_move() -> None:
    """A control: what is right already has nothing to be fitted but noise, of which a rising curve
    has more.
    """
    generator = torch.Generator().manual_seed(1)
    scores_B = torch.rand(50_000, generator=generator)
    labels_B = (torch.rand(50_000, generator=generator) < scores_B).float()
    (found,) = fit_calibrators("logistic", scores_B[:, None], labels_B[:, None], None, ["label"])
    assert float((found(scores_B) - scores_B).abs().mean()) < 0.01
    with pytest.raises(
        WorseError, match=r"'label': isotonic makes scores worse \(log loss 0.49\d+ becomes"
    ):
        fit_calibrators("isotonic", scores_B[:, None], labels_B[:, None], None, ["label"])


def loss_of(scores_B: torch.Tensor, labels_B: torch.Tensor) -> float:
    return float(torch.nn.functional.binary_cross_entropy(scores_B.double(), labels_B.double()))


def test_scores_that_fall_as_labels_rise_become_the_rate() -> None:
    """With the slope at its bound, the intercept is that of the bound, not that of the slope which
    was not taken.
    """
    generator = torch.Generator().manual_seed(4)
    scores_B = torch.rand(5000, generator=generator)
    labels_B = (torch.rand(5000, generator=generator) < 0.2 * (1 - scores_B)).float()
    (found,) = fit_calibrators("logistic", scores_B[:, None], labels_B[:, None], None, ["label"])
    assert found.slope == 0
    assert found(scores_B).mean() == pytest.approx(float(labels_B.mean()), abs=1e-3)


@pytest.mark.parametrize("unit", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("kind", SOME)
def test_the_scale_of_weights_means_nothing(kind: str, unit: float) -> None:
    scores_B, labels_B, weights_B = wrong(2000)
    (want,) = fit_calibrators(kind, scores_B[:, None], labels_B[:, None], weights_B, ["label"])
    (found,) = fit_calibrators(
        kind, scores_B[:, None], labels_B[:, None], unit * weights_B, ["label"]
    )
    assert (found(scores_B) - want(scores_B)).abs().max() < 1e-9


def test_rows_that_scores_tell_apart_get_a_curve_that_is_not_a_step() -> None:
    """Fitted to chance a slope would have no bound; at the bounds of what is known it has one
    (Platt, 1999).
    """
    scores_B = torch.linspace(0.3, 0.7, 200)
    (found,) = fit_calibrators(
        "logistic", scores_B[:, None], (scores_B > 0.5).float()[:, None], None, ["label"]
    )
    assert 1 < found.slope < 200


@pytest.mark.parametrize("kind", SOME)
@pytest.mark.parametrize("clicks", [1, 9])
def test_a_few_rows_of_a_kind_are_too_few(kind: str, clicks: int) -> None:
    scores_B = torch.linspace(0.01, 0.2, 1000)
    labels_B = (torch.arange(1000) % (1000 // clicks + 1) == 5).float()
    for y_B, told in (
        (labels_B, f"as {clicks}.0 positives and {1000 - clicks}.0"),
        (1 - labels_B, f"{clicks}.0 neg"),
    ):
        with pytest.raises(UserError, match=rf"'label' counts {told}|'label' counts as .*{told}"):
            fit_calibrators(kind, scores_B[:, None], y_B[:, None], None, ["label"])


def test_one_row_with_much_weight_is_one_row() -> None:
    scores_B, labels_B, weights_B = (
        torch.linspace(0.1, 0.9, 1000),
        torch.zeros(1000),
        torch.ones(1000),
    )
    labels_B[7], weights_B[7] = 1.0, 500.0
    with pytest.raises(
        UserError, match=r"in 1 and 999 rows of the valid part, where 10 are the least"
    ):
        fit_calibrators("isotonic", scores_B[:, None], labels_B[:, None], weights_B, ["label"])


@pytest.mark.parametrize("kind", SOME)
def test_rows_that_count_showings_are_as_if_each_were_a_row(kind: str) -> None:
    generator = torch.Generator().manual_seed(6)
    rates_B = torch.rand(300, generator=generator).double() * 0.05
    shown_B = torch.randint(20, 400, (300,), generator=generator).double()
    clicks_B = torch.binomial(shown_B, rates_B, generator=generator)
    (found,) = fit_calibrators(
        kind,
        2 * rates_B[:, None],
        (clicks_B / shown_B)[:, None],
        shown_B,
        ["label"],
        are_counts=True,
    )
    many_M = torch.arange(300).repeat_interleave(shown_B.long())
    place_M = torch.cat([torch.arange(int(n)) for n in shown_B])
    labels_M = (place_M < clicks_B[many_M]).double()
    (want,) = fit_calibrators(
        kind, 2 * rates_B[many_M][:, None], labels_M[:, None], None, ["label"]
    )
    assert (found(2 * rates_B) - want(2 * rates_B)).abs().max() < 1e-6


@pytest.mark.parametrize("kind", SOME)
def test_scores_that_tell_nothing_become_the_rate(kind: str) -> None:
    """A coin: every score becomes the share of clicks."""
    generator = torch.Generator().manual_seed(2)
    scores_B, labels_B = (
        torch.rand(20_000, generator=generator),
        (torch.rand(20_000, generator=generator) < 0.3).float(),
    )
    (found,) = fit_calibrators(kind, scores_B[:, None], labels_B[:, None], None, ["label"])
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


def test_a_delta_is_calibrated_as_its_base(
    run_dir: Path, prepared: Path, log: Path, tmp_path: Path
) -> None:
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
    assert card(after)["notes"] == [
        "its logistic calibrator was fitted to the valid part, since the base has one"
    ]


def test_a_delta_without_valid_rows_keeps_the_calibrator_of_its_base(
    run_dir: Path, log: Path, tmp_path: Path
) -> None:
    export(run_dir, tmp_path / "base", [log], calibrate="logistic")
    day = data.prepare(
        [log], tmp_path / "day", schema=Transforms.load(run_dir), split=Split(valid=0, test=0)
    ).out
    train(small_run(day, tmp_path / "next", loop=Loop(max_steps=3), init_from=str(run_dir)))
    export(tmp_path / "next", tmp_path / "delta", [log], base=[tmp_path / "base"])
    before, after = load(tmp_path / "base"), load(tmp_path / "base", [tmp_path / "delta"])
    assert after.calibrators == before.calibrators != ()
    assert card(after)["notes"] == [
        "its calibrator is that of the base, as the log has no valid rows"
    ]
    with pytest.raises(UserError, match="has no valid part to fit to"):
        export(
            tmp_path / "next",
            tmp_path / "other",
            [log],
            base=[tmp_path / "base"],
            calibrate="logistic",
        )


def card(scorer: Scorer) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((scorer.folder.path / "card.json").read_text())
    return found


def test_a_file_that_is_not_of_the_folder_is_not_read(
    run_dir: Path, log: Path, tmp_path: Path
) -> None:
    export(run_dir, tmp_path / "model", [log])
    calibrator_files.save([logistic.Config(slope=1.0, intercept=1e-7)], tmp_path / "model")
    assert load(tmp_path / "model").calibrators == ()


@pytest.mark.parametrize("kind", ["logistic", "isotonic"])
def test_rows_that_lack_a_label_are_not_fitted_to(kind: str) -> None:
    torch.manual_seed(0)
    scores, weights = torch.rand(400, 2), torch.rand(400) + 0.1
    labels = torch.bernoulli(scores.square())
    lacks = torch.rand(400) < 0.4
    labels[lacks, 1] = torch.nan
    both = fit_calibrators(kind, scores, labels, weights, ["a", "b"])
    kept = [part[~lacks] for part in (scores, labels, weights)]
    assert both[1] == fit_calibrators(kind, *kept, ["a", "b"])[1]
    assert both[0] == fit_calibrators(kind, scores[:, :1], labels[:, :1], weights, ["a"])[0]


def test_labels_that_are_all_alike_are_refused() -> None:
    scores, ones = torch.rand(5, 1), torch.ones(5, 1)
    with pytest.raises(UserError, match="label 'click' is the same in all rows"):
        fit_calibrators("logistic", scores, ones, None, ["click"])
