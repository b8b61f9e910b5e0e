from __future__ import annotations

import math

import pytest
import torch
from sklearn.metrics import log_loss

from sparrow.core import UserError
from sparrow.metrics import CLAMP, calibration, logloss, logloss_from_logits, ne


@pytest.fixture
def rows() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    logits = torch.randn(4000, dtype=torch.float64) * 2 - 1
    return logits, torch.bernoulli(torch.sigmoid(logits)), torch.rand(4000) + 0.1


@pytest.mark.parametrize("weighted", [False, True])
def test_logloss_is_sklearns(rows: tuple, weighted: bool) -> None:
    logits, labels, weights = rows
    weights = weights if weighted else None
    scores = torch.sigmoid(logits)
    expected = log_loss(labels, scores, sample_weight=weights)
    assert logloss(scores, labels, weights) == pytest.approx(expected, rel=1e-6)
    assert logloss_from_logits(logits, labels, weights) == pytest.approx(expected, rel=1e-6)
    rate = (
        float(labels.mean()) if weights is None else float((weights * labels).sum() / weights.sum())
    )
    constant = torch.full_like(scores, rate)
    base = log_loss(labels, constant, sample_weight=weights)
    assert ne(scores, labels, weights) == pytest.approx(expected / base, rel=1e-6)
    assert ne(constant, labels, weights) == pytest.approx(1.0)
    assert calibration(constant, labels, weights) == pytest.approx(1.0)
    assert calibration(constant / 2, labels, weights) == pytest.approx(0.5)


def test_ne_against_another_base_rate(rows: tuple) -> None:
    logits, labels, _ = rows
    other = torch.full_like(logits, 0.05)
    expected = log_loss(labels, torch.sigmoid(logits)) / log_loss(labels, other)
    assert ne(torch.sigmoid(logits), labels, base_rate=0.05) == pytest.approx(expected, rel=1e-6)
    assert ne(other, labels, base_rate=0.05) == pytest.approx(1.0)


def test_a_sure_mistake_costs_the_clamp_and_a_logit_all_of_it() -> None:
    one = torch.ones(1)
    assert logloss(torch.zeros(1), one) == pytest.approx(-math.log(CLAMP))
    assert logloss(one, 0 * one) == pytest.approx(-math.log(CLAMP))
    assert logloss_from_logits(-1000 * one, one) == pytest.approx(1000)
    assert logloss_from_logits(1000 * one, one) == 0


def test_undefined_is_nan() -> None:
    empty, one = torch.empty(0), torch.ones(1)
    for metric in (logloss, ne, calibration, logloss_from_logits):
        assert math.isnan(metric(empty, empty))
    assert math.isnan(ne(one / 2, one))
    assert math.isnan(calibration(one / 2, 0 * one))
    assert math.isnan(logloss(one * math.nan, one))
    assert math.isnan(logloss(one / 2, one, 0 * one))


@pytest.mark.parametrize("score", [-0.1, 1.5, math.inf])
def test_logits_are_refused(score: float) -> None:
    for metric in (logloss, ne, calibration):
        with pytest.raises(UserError, match="scores: .*logloss_from_logits"):
            metric(torch.tensor([0.5, score]), torch.tensor([0.0, 1.0]))
