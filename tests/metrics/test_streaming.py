from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from sparrow.core import UserError
from sparrow.metrics import Streaming, auc, calibration, ece, logloss, ne
from sparrow.metrics.intervals import auc_error


def draw(rows: int, bias: float = -2.0, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    scores = torch.sigmoid(torch.randn(rows, generator=random) * 1.5 + bias)
    return scores, torch.bernoulli(scores, generator=random), torch.rand(rows, generator=random) * 3


def stream(*columns: Tensor | None, cut: int = 1000) -> Streaming:
    made = Streaming()
    assert columns[0] is not None
    for low in range(0, len(columns[0]), cut):
        made.update(*(None if c is None else c[low : low + cut] for c in columns))  # type: ignore[arg-type]
    return made


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("bias", [-8.0, -2.0, 3.0])
def test_a_stream_is_the_functions(bias: float, weighted: bool) -> None:
    scores, labels, weights = draw(20_000, bias)
    columns = (scores, labels, weights if weighted else None)
    made = stream(*columns)
    result = made.result()
    for name, metric in (("logloss", logloss), ("ne", ne), ("calibration", calibration)):
        assert result[name] == pytest.approx(metric(*columns), rel=1e-9)
    assert result["examples"] == 20_000
    assert result["base_rate"] == pytest.approx(
        float((labels * weights).sum() / weights.sum()) if weighted else float(labels.mean()),
        rel=1e-5,
    )
    assert made.ne(base_rate=0.3) == pytest.approx(ne(*columns, base_rate=0.3), rel=1e-9)
    assert 0 < auc_error(made) < 1e-3
    assert result["auc"] == pytest.approx(auc(*columns), abs=auc_error(made))


def test_the_bound_is_reached_and_not_exceeded() -> None:
    scores = torch.tensor([0.5, 0.500001, 0.9], dtype=torch.float64)  # the first two share a bin
    made = stream(scores, torch.tensor([0.0, 1.0, 1.0]))
    assert auc(scores, torch.tensor([0.0, 1.0, 1.0])) - made.result()["auc"] == pytest.approx(
        auc_error(made)
    )
    assert auc_error(made) == pytest.approx(0.25)


def test_integer_scores_counts_are_exact() -> None:
    scores, labels, _ = draw(20_000)
    levels = (scores * 20).round() / 20  # no two levels share a bin
    assert stream(levels, labels).result()["auc"] == auc(levels, labels)


def test_parts_add_up() -> None:
    columns = draw(10_000)
    merged = stream(*(c[:4000] for c in columns))
    merged.merge(stream(*(c[4000:] for c in columns)))
    whole = stream(*columns)
    assert merged.result() == pytest.approx(whole.result(), rel=1e-12)
    assert auc_error(merged) == pytest.approx(auc_error(whole), rel=1e-9)


def test_going_on_from_a_saved_state_gives_the_same_bits() -> None:
    columns = draw(10_000)
    saved = stream(*(c[:5000] for c in columns))
    state = saved.state_dict()
    # what happens to the first after saving does not reach the copy
    saved.update(*(c[:1000] for c in columns))
    resumed = Streaming()
    resumed.load_state_dict(state)
    for low in range(5000, 10_000, 1000):
        resumed.update(*(c[low : low + 1000] for c in columns))
    whole = stream(*columns)
    assert resumed.result() == whole.result()
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name])


def test_several_streams_take_in_the_same_rows() -> None:
    first, second = (tuple(c[low : low + 1000] for c in draw(2000)) for low in (0, 1000))
    since, all_along = Streaming(), Streaming()
    all_along.update(*first)
    since.update(*second, also=[all_along])
    for made, alone in ((since, stream(*second)), (all_along, stream(*draw(2000)))):
        for name, tensor in alone.state_dict().items():
            assert torch.equal(tensor, made.state_dict()[name])


def test_without_rows_one_class_and_nan() -> None:
    empty = Streaming().result()
    assert empty.pop("examples") == 0
    assert all(map(math.isnan, empty.values()))
    clicks = stream(torch.tensor([0.2, 0.4]), torch.ones(2)).result()
    assert math.isnan(clicks["auc"]) and math.isnan(clicks["ne"])
    assert clicks["calibration"] == pytest.approx(0.3)
    broken = stream(torch.tensor([0.2, math.nan]), torch.tensor([0.0, 1.0])).result()
    assert broken["examples"] == 2
    assert all(math.isnan(broken[name]) for name in ("auc", "logloss", "ne", "calibration"))


def test_the_ends_of_the_scale() -> None:
    scores = torch.tensor([0.0, 0.0, 1.0, 1.0])
    assert stream(scores, torch.tensor([0.0, 1.0, 0.0, 1.0])).result()["auc"] == 0.5
    assert stream(scores, torch.tensor([0.0, 0.0, 1.0, 1.0])).result()["auc"] == 1.0


def test_reliability() -> None:
    scores, labels, weights = draw(50_000)
    curve = stream(scores, labels, weights).reliability(10)
    assert curve.weights_Q.sum() == pytest.approx(float(weights.double().sum()))
    assert curve.weights_Q == pytest.approx(float(weights.sum()) / 10, rel=0.01)
    order = scores.argsort()
    lowest = order[weights[order].cumsum(0) <= weights.sum() / 10]
    expected = float((weights * scores)[lowest].sum() / weights[lowest].sum())
    assert float(curve.predictions_Q[0]) == pytest.approx(expected, rel=0.01)
    assert bool((curve.predictions_Q.diff() > 0).all())
    spread = (curve.predictions_Q * (1 - curve.predictions_Q) / curve.weights_Q).sqrt()
    assert bool(((curve.labels_Q - curve.predictions_Q).abs() < 5 * spread).all())
    off = stream(scores / 2, labels, weights).reliability(10)
    assert bool((off.labels_Q[-3:] > 1.5 * off.predictions_Q[-3:]).all())
    assert Streaming().reliability().weights_Q.numel() == 0
    assert stream(
        torch.full((9,), 0.3), torch.zeros(9)
    ).reliability().predictions_Q.tolist() == pytest.approx([0.3], rel=3e-4)


@pytest.mark.parametrize("weighted", [False, True])
def test_ece_is_a_loop_over_equal_parts(weighted: bool) -> None:
    random = torch.Generator().manual_seed(0)
    # each in a bin of its own
    scores = torch.sigmoid(torch.linspace(-5, 5, 2000, dtype=torch.float64))
    labels = torch.bernoulli(scores**1.2, generator=random)
    weights = torch.where(torch.arange(2000) < 1000, 1.0, 3.0) if weighted else None
    w = torch.ones(2000) if weights is None else weights
    place = (w.cumsum(0) - w / 2) / w.sum()
    expected = 0.0
    for part in range(20):
        here = (place >= part / 20) & (place < (part + 1) / 20)
        gap = (w * scores)[here].sum() / w[here].sum() - (w * labels)[here].sum() / w[here].sum()
        expected += float(gap.abs() * w[here].sum() / w.sum())
    order = torch.randperm(2000, generator=random)
    shuffled = (scores[order], labels[order], None if weights is None else weights[order])
    assert ece(*shuffled) == pytest.approx(expected, rel=1e-6)
    assert stream(*shuffled).ece() == pytest.approx(expected, abs=3e-4)
    assert ece(scores, scores) == 0  # labels as likely as said


def test_ece_of_a_constant_and_of_nothing() -> None:
    labels = torch.tensor([0.0, 0.0, 0.0, 1.0])
    assert ece(torch.full((4,), 0.25), labels) == pytest.approx(0)
    # one range, whatever the order of the labels
    assert ece(torch.full((4,), 0.65), labels) == pytest.approx(0.4)
    for undefined in (
        ece(torch.empty(0), torch.empty(0)),
        ece(torch.full((4,), math.nan), labels),
        Streaming().ece(),
    ):
        assert math.isnan(undefined)


def test_logits_are_refused() -> None:
    with pytest.raises(UserError, match="scores: 3 in row 1"):
        Streaming().update(torch.tensor([0.5, 3.0]), torch.tensor([0.0, 1.0]))
