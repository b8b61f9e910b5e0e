from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from sklearn.metrics import log_loss, roc_auc_score
from torch import Tensor

from sparrow.core import Batch, KeyedJagged, UserError
from sparrow.metrics import ece, evaluate, evaluate_labels, gauc, topk


def cut(scores: Tensor, labels: Tensor | None, weights: Tensor | None = None, sessions: Tensor | None = None) -> list:
    def part(t: Tensor | None, low: int) -> Tensor | None:
        return None if t is None else t[low : low + 300]

    return [
        Batch(
            dense_BC=scores[low : low + 300, None],
            ids=KeyedJagged.from_lists({}),
            labels_BT=None if labels is None else labels[low : low + 300, None],
            weights_B=part(weights, low),
            session_B=part(sessions, low),
        )
        for low in range(0, len(scores), 300)
    ]


@pytest.fixture
def rows() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    scores = torch.rand(2000)
    return scores, torch.bernoulli(scores), torch.rand(2000) + 0.5, torch.arange(2000) // 7


@pytest.mark.parametrize("flat", [False, True])
def test_all_batches_count(rows: tuple, flat: bool) -> None:
    scores, labels, weights, sessions = rows
    got = evaluate(lambda b: b.dense_BC[:, 0] if flat else b.dense_BC, cut(*rows), exact=True)
    assert got["auc"] == pytest.approx(roc_auc_score(labels, scores, sample_weight=weights), abs=1e-9)
    assert got["logloss"] == pytest.approx(log_loss(labels, scores.double(), sample_weight=weights), rel=1e-6)
    grouped = gauc(scores, labels, sessions, weights)
    assert (got["gauc"], got["gauc_groups"]) == (grouped.value, grouped.counted)
    assert 0 < got["gauc_groups"] < 2000 / 7
    assert got["examples"] == 2000
    assert got["calibration"] == pytest.approx(float((weights * scores).sum() / (weights * labels).sum()), rel=1e-5)


def test_within_groups(rows: tuple) -> None:
    scores, labels, weights, sessions = rows
    got = evaluate(lambda b: b.dense_BC, cut(*rows), ks=(3, 1))
    assert {name: got[name] for name in got if "@" in name or name == "mrr"} == {
        name: value for name, value in topk(scores, labels, sessions, weights, (1, 3)).items() if "groups" not in name
    }
    assert "recall@5" not in got
    without = sum(not labels[sessions == session].any() for session in sessions.unique())
    assert got["groups_without_positive"] == without > 0
    assert got["ranked_groups"] == len(sessions.unique()) - without > got["gauc_groups"]
    calls = []
    with pytest.raises(UserError, match="k: 0"):
        evaluate(calls.append, cut(*rows), ks=[0])  # type: ignore[arg-type]
    assert not calls


def test_streaming_has_no_groups_and_bins(rows: tuple) -> None:
    scores, labels, weights, _ = rows
    exact, streamed = (evaluate(lambda b: b.dense_BC, cut(*rows), exact=e) for e in (True, False))
    assert exact["ece"] == pytest.approx(ece(scores, labels, weights), rel=1e-12)
    for name, near in (("auc", 1e-3), ("ece", 3e-4)):
        assert streamed.pop(name) == pytest.approx(exact.pop(name), abs=near)
    assert streamed == {name: exact[name] for name in streamed}
    assert set(exact) - set(streamed) > {"gauc", "mrr", "recall@5"}


def test_a_missing_weight_is_one(rows: tuple) -> None:
    scores, labels, weights, _ = rows
    weights[:300] = 1
    batches = cut(scores, labels, weights)
    mixed = cut(scores[:300], labels[:300]) + batches[1:]
    assert evaluate(lambda b: b.dense_BC, mixed) == evaluate(lambda b: b.dense_BC, batches)
    assert "gauc" not in evaluate(lambda b: b.dense_BC, mixed)


def test_gradients_are_not_kept(rows: tuple) -> None:
    weight = torch.ones((), requires_grad=True)
    grads = []

    def score(batch: Batch) -> Tensor:
        scores = weight * batch.dense_BC
        grads.append(scores.requires_grad)
        return scores

    evaluate(score, cut(*rows))
    assert not any(grads)


@pytest.mark.parametrize("exact", [False, True])
def test_nothing_to_measure(rows: tuple, exact: bool) -> None:
    scores, labels, *_ = rows
    with pytest.raises(UserError, match="no labels"):
        evaluate(lambda b: b.dense_BC, cut(scores, None), exact=exact)
    with pytest.raises(UserError, match="no rows"):
        evaluate(lambda b: b.dense_BC, cut(scores[:0], labels[:0]), exact=exact)
    with pytest.raises(UserError, match="one score"):
        evaluate(lambda b: b.dense_BC.expand(-1, 2), cut(scores, labels), exact=exact)
    ones = evaluate(lambda b: b.dense_BC, cut(scores, torch.ones_like(labels)), exact=exact)
    assert math.isnan(ones["auc"])


@pytest.mark.parametrize("exact", [False, True])
def test_several_labels_are_judged_in_one_pass(rows: tuple, exact: bool) -> None:
    scores, _, weights, sessions = rows
    other = torch.bernoulli(scores / 3)
    batches = [
        dataclasses.replace(batch, labels_BT=torch.cat([batch.labels_BT, o[:, None]], 1))
        for batch, o in zip(cut(*rows), other.split(300), strict=True)
    ]
    calls = []

    def score(batch: Batch) -> Tensor:
        calls.append(batch)
        return torch.cat([batch.dense_BC, batch.dense_BC / 3], 1)

    found = evaluate_labels(score, batches, [1, 0], exact=exact)
    assert len(calls) == len(batches)
    assert found == [evaluate(score, batches, label=label, exact=exact) for label in (1, 0)]
    assert found[1] == evaluate(lambda b: b.dense_BC, cut(*rows), exact=exact)
    assert found[0] == evaluate(lambda b: b.dense_BC / 3, cut(scores, other, weights, sessions), exact=exact)
    assert ("gauc" in found[0]) == exact
    with pytest.raises(UserError, match="one score"):
        evaluate_labels(score, batches, [0, 2], exact=exact)
