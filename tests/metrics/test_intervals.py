from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.stats import t as student
from torch import Tensor

from sparrow.metrics import METRICS, Metric, auc, calibration, ece, gauc, logloss, ne, topk
from sparrow.metrics.intervals import estimates, mean, t_quantile


def made(sessions: int, seed: int, *, size: int = 5, shared: float = 1.0) -> dict[str, Tensor]:
    """Two models' scores of clicks whose log-odds a session shares, so that its rows are not
    independent.
    """
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float64)

    session_B = torch.arange(sessions).repeat_interleave(size)
    truth_B = (shared * normal(sessions))[session_B] + normal(sessions * size) - 1
    labels_B = (torch.rand(len(truth_B), generator=random) < truth_B.sigmoid()).double()
    a_B, b_B = ((truth_B + noise * normal(len(truth_B))).sigmoid() for noise in (1.0, 0.8))
    weights_B = torch.rand(len(truth_B), generator=random, dtype=torch.float64) + 0.5
    return {"a": a_B, "b": b_B, "labels": labels_B, "weights": weights_B, "sessions": session_B}


def exact(scores_B: Tensor, rows: dict[str, Tensor], weights_B: Tensor) -> dict[str, float]:
    functions = {"auc": auc, "logloss": logloss, "ne": ne, "calibration": calibration, "ece": ece}
    values = {name: f(scores_B, rows["labels"], weights_B) for name, f in functions.items()}
    within = topk(scores_B, rows["labels"], rows["sessions"], weights_B)
    values |= {name: value for name, value in within.items() if "groups" not in name}
    return values | {"gauc": gauc(scores_B, rows["labels"], rows["sessions"], weights_B).value}


def test_the_values_are_those_of_the_metrics() -> None:
    rows = made(200, 0)
    got = estimates(rows["a"], rows["labels"], rows["weights"], rows["sessions"])
    assert {name: e.value for name, e in got.items()} == pytest.approx(
        exact(rows["a"], rows, rows["weights"])
    )


def test_an_influence_is_the_derivative_by_a_sessions_weight() -> None:
    rows = made(40, 1)
    got = estimates(rows["a"], rows["labels"], rows["weights"], rows["sessions"])
    step = 1e-6
    for session in (0, 7, 39):
        mine_B = (rows["sessions"] == session).double()
        more = exact(rows["a"], rows, rows["weights"] * (1 + step * mine_B))
        less = exact(rows["a"], rows, rows["weights"] * (1 - step * mine_B))
        for name, estimate in got.items():
            slope = (more[name] - less[name]) / (2 * step)
            assert float(estimate.influence_G[session]) == pytest.approx(slope, abs=1e-8), name


def test_torch_finds_the_influences_of_what_a_model_measures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A function of a ratio; the slope is by a session's weight."""
    perplexity = Metric(
        name="perplexity",
        title="perplexity",
        better="lower",
        measures=("nll", "tokens"),
        value=lambda nll, tokens: (nll / tokens).exp(),
    )
    monkeypatch.setitem(METRICS, "perplexity", perplexity)
    rows = made(40, 1)
    random = torch.Generator().manual_seed(5)
    tokens_B = torch.randint(0, 9, (200,), generator=random)
    measures = {"nll": tokens_B * torch.rand(200, generator=random), "tokens": tokens_B}

    def exactly(weights_B: Tensor) -> float:
        nll = float((weights_B * measures["nll"].double()).sum())
        return math.exp(nll / float((weights_B * tokens_B.double()).sum()))

    columns = (rows["a"], rows["labels"], rows["weights"], rows["sessions"])
    assert "perplexity" not in estimates(*columns)
    assert "perplexity" not in estimates(*columns, measures={"nll": measures["nll"]})
    with torch.no_grad():  # as models are scored
        estimate = estimates(*columns, measures=measures)["perplexity"]
    assert estimate.value == pytest.approx(exactly(rows["weights"]), rel=1e-12)
    assert float(estimate.influence_G.sum()) == pytest.approx(0, abs=1e-12)
    for session in (0, 7, 39):
        step_B = 1e-6 * (rows["sessions"] == session).double()
        more = exactly(rows["weights"] * (1 + step_B))
        less = exactly(rows["weights"] * (1 - step_B))
        slope = (more - less) / 2e-6
        assert float(estimate.influence_G[session]) == pytest.approx(slope, abs=1e-8)
    nothing = {name: torch.zeros(200) for name in measures}
    undefined = estimates(*columns, measures=nothing)["perplexity"]
    assert math.isnan(undefined.value) and bool(undefined.influence_G.isnan().all())


def test_units_of_several_sessions_are_what_is_independent() -> None:
    """Each influence is the sum of those of its sessions, so the error is that of a bootstrap over
    users.
    """
    rows = made(40, 4)
    user_B = rows["sessions"] // 4
    by_session, by_user = (
        estimates(rows["a"], rows["labels"], rows["weights"], rows["sessions"], units_B)
        for units_B in (None, user_B)
    )
    for name, estimate in by_user.items():
        assert estimate.value == by_session[name].value
        sums = by_session[name].influence_G.view(10, 4).sum(1)
        assert torch.allclose(estimate.influence_G, sums, atol=1e-12), name
    alone = estimates(rows["a"], rows["labels"], rows["weights"], units_B=user_B)
    assert torch.allclose(alone["auc"].influence_G, by_user["auc"].influence_G, atol=1e-12)


def delong(a_B: Tensor, b_B: Tensor, labels_B: Tensor) -> tuple[float, float]:
    """Difference of AUCs and its standard error as DeLong et al. 1988 write it, every pair
    compared.
    """

    def kernel(scores_B: Tensor) -> np.ndarray:
        clicks, others = scores_B[labels_B == 1].numpy(), scores_B[labels_B == 0].numpy()
        return (clicks[:, None] > others[None, :]) + 0.5 * (clicks[:, None] == others[None, :])

    won = kernel(b_B) - kernel(a_B)
    variance = won.mean(1).var(ddof=1) / won.shape[0] + won.mean(0).var(ddof=1) / won.shape[1]
    return float(won.mean()), math.sqrt(variance)


def test_auc_without_sessions_is_delongs() -> None:
    rows = made(300, 2)
    a_B, b_B = (rows[name].mul(20).round().div(20) for name in "ab")  # ties
    difference = estimates(b_B, rows["labels"])["auc"] - estimates(a_B, rows["labels"])["auc"]
    value, error = delong(a_B, b_B, rows["labels"])
    assert difference.value == pytest.approx(value, abs=1e-12)
    # they divide by n - 1 within each class
    assert difference.error == pytest.approx(error, rel=0.005)


def test_errors_are_those_of_a_bootstrap_over_sessions() -> None:
    rows, rng = made(400, 3), np.random.default_rng(0)
    a, b = (estimates(rows[n], rows["labels"], rows["weights"], rows["sessions"]) for n in "ab")
    drawn = []
    for _ in range(400):
        times_G = torch.tensor(
            np.bincount(rng.integers(0, 400, 400), minlength=400), dtype=torch.float64
        )
        weights_B = rows["weights"] * times_G[rows["sessions"]]
        one, other = (exact(rows[n], rows, weights_B) for n in "ab")
        drawn.append({name: other[name] - one[name] for name in one})
    for name in a:
        spread = np.std([d[name] for d in drawn])
        assert (b[name] - a[name]).error == pytest.approx(
            spread, rel=0.25 if name == "ece" else 0.15
        ), name


@pytest.mark.slow
def test_intervals_cover_the_truth_as_often_as_they_say() -> None:
    large = made(200_000, 10)
    a, b = (estimates(large[n], large["labels"], None, large["sessions"]) for n in "ab")
    truth, blind, trials = {n: b[n].value - a[n].value for n in a}, 0, 1000
    # all five rows of a session are among the first five
    fixed = [n for n in a if "@5" in n or "@10" in n]
    covered = {n: 0 for n in a if n not in fixed and n != "ece"}  # noise alone is more than no ECE
    rate = float(large["labels"].mean())
    for trial in range(trials):
        rows = made(150, 1000 + trial)
        one, other = (estimates(rows[n], rows["labels"], None, rows["sessions"]) for n in "ab")
        for name in covered:
            difference = other[name] - one[name]
            covered[name] += abs(difference.value - truth[name]) < 1.96 * difference.error
        alone = estimates(torch.full_like(rows["a"], rate), rows["labels"])["calibration"]
        blind += abs(alone.value - 1) < 1.96 * alone.error
    for name, times in covered.items():
        assert 0.93 < times / trials < 0.97, (name, times)
    # rows taken for independent, which they are not: what sessions are counted for
    assert blind / trials < 0.92


def test_what_is_undefined_is_nan() -> None:
    ones, scores = torch.ones(4), torch.full((4,), 0.5)
    got = estimates(scores, ones, None, torch.arange(4))
    assert {n for n, e in got.items() if math.isnan(e.value)} == {"auc", "gauc", "ne"}
    assert math.isnan(got["auc"].error)
    assert "gauc" not in estimates(scores, ones)
    assert math.isnan(estimates(torch.empty(0), torch.empty(0))["logloss"].value)
    assert math.isnan(estimates(torch.tensor([0.5]), torch.ones(1))["logloss"].error)


def test_a_mean_over_models_has_the_error_of_the_mean() -> None:
    rows = made(100, 4)
    a, b = (estimates(rows[n], rows["labels"])["logloss"] for n in "ab")
    together = mean([a, b])
    assert together.value == pytest.approx((a.value + b.value) / 2)
    assert (mean([a, a]) - a).error == 0
    assert together.error < max(a.error, b.error)


@pytest.mark.parametrize("degrees", [1, 1.5, 2, 4, 7.3, 30, 1000, 1e9])
@pytest.mark.parametrize("level", [0.8, 0.95, 0.99])
def test_t_quantile_is_scipys(level: float, degrees: float) -> None:
    assert t_quantile(level, degrees) == pytest.approx(
        student.ppf((1 + level) / 2, degrees), rel=1e-3
    )
