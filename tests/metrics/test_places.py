from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import ndcg_score
from torch import Tensor

from sparrow.core import UserError
from sparrow.metrics import topk
from sparrow.metrics.metric import topk_names
from sparrow.metrics.places import topk_by_group

KS = (1, 2, 5)
ROWS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 1), st.floats(0.1, 4), st.integers(0, 3)),
    min_size=1,
    max_size=14,
)


def of_one_order(labels: list[int]) -> dict[str, float]:
    """The metrics of candidates in this order, as their definitions say."""
    places = [place for place, label in enumerate(labels, 1) if label]
    best = sum(1 / math.log2(place + 1) for place in range(1, len(places) + 1))
    found = {"mrr": 1 / places[0]}
    for k in KS:
        top = [place for place in places if place <= k]
        found[f"recall@{k}"] = len(top) / len(places)
        found[f"hit_rate@{k}"] = float(bool(top))
        best = sum(1 / math.log2(place + 1) for place in range(1, min(k, len(places)) + 1))
        found[f"ndcg@{k}"] = sum(1 / math.log2(place + 1) for place in top) / best
    return found


def of_all_orders(scores: list[float], labels: list[int]) -> dict[str, float]:
    """Means over every order of the candidates in which no score stands above a greater one."""
    by_score = itertools.groupby(
        sorted(zip(scores, labels, strict=True), reverse=True), key=lambda row: row[0]
    )
    ties = [list(itertools.permutations([label for _, label in tied])) for _, tied in by_score]
    found = [
        of_one_order([label for tie in order for label in tie])
        for order in itertools.product(*ties)
    ]
    return {name: sum(one[name] for one in found) / len(found) for name in found[0]}


@settings(max_examples=60)
@given(ROWS)
def test_a_group_is_the_mean_over_all_orders_of_its_ties(rows: list) -> None:
    # 720 orders at most
    rows = [row for i, row in enumerate(rows) if sum(r[3] == row[3] for r in rows[:i]) < 6]
    scores, labels, weights, groups = (torch.tensor(column) for column in zip(*rows, strict=True))
    by_metric, weight_G = topk_by_group(scores / 3, labels, groups, weights, KS)
    above, below, without = dict.fromkeys(topk_names(KS), 0.0), 0.0, 0
    for i, group in enumerate(groups.unique()):
        here = groups == group
        assert float(weight_G[i]) == pytest.approx(float(weights[here].double().mean()))
        if not labels[here].any():
            without += 1
            assert all(math.isnan(values_G[i]) for values_G in by_metric.values())
            continue
        wanted = of_all_orders(scores[here].tolist(), labels[here].tolist())
        for name, value in wanted.items():
            assert float(by_metric[name][i]) == pytest.approx(value, abs=1e-12), name
            above[name] += float(weight_G[i]) * value
        below += float(weight_G[i])
    got = topk(scores / 3, labels, groups, weights, KS)
    assert (got.pop("ranked_groups"), got.pop("groups_without_positive")) == (
        len(weight_G) - without,
        without,
    )
    wanted = {name: above[name] / below if below else math.nan for name in topk_names(KS)}
    assert got == pytest.approx(wanted, abs=1e-9, nan_ok=True)


def test_ndcg_is_sklearns() -> None:
    """Which also takes the mean over the orders of equal scores."""
    random = torch.Generator().manual_seed(0)
    scores = (torch.rand(40, 30, generator=random, dtype=torch.float64) * 8).round()
    labels = (torch.rand(40, 30, generator=random) < 0.2).double()
    labels[:, 0] = 1
    groups = torch.arange(40).repeat_interleave(30)
    for k in (1, 3, 10, 100):
        found = topk(scores.flatten(), labels.flatten(), groups, ks=[k])[f"ndcg@{k}"]
        assert found == pytest.approx(ndcg_score(labels, scores, k=k), abs=1e-12)


@pytest.mark.parametrize("positives", [1, 3])
def test_a_constant_model_gets_what_chance_gets(positives: int) -> None:
    """Wherever the positives stand in the log; a sort that keeps the log's order would give 1 or
    0.
    """
    count = 20
    for labels in (torch.arange(count) < positives, torch.arange(count) >= count - positives):
        got = topk(torch.full((count,), 0.3), labels.float(), torch.zeros(count, dtype=torch.int64))
        for k in (5, 10):
            assert got[f"recall@{k}"] == pytest.approx(k / count)
            missed = math.comb(count - positives, k) / math.comb(count, k)
            assert got[f"hit_rate@{k}"] == pytest.approx(1 - missed)
        if positives == 1:
            assert got["mrr"] == pytest.approx(
                sum(1 / place for place in range(1, count + 1)) / count
            )


def test_many_equal_scores() -> None:
    """No factorial of a large number may spoil it."""
    count, positives = 200_000, 3
    labels = (torch.arange(count) < positives).float()
    got = topk(torch.zeros(count), labels, torch.zeros(count, dtype=torch.int64), ks=[10])
    missed = math.prod((count - positives - i) / (count - i) for i in range(10))
    assert got["hit_rate@10"] == pytest.approx(1 - missed, rel=1e-6)
    assert got["recall@10"] == pytest.approx(10 / count)


def rows(seed: int = 0, count: int = 3000) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    groups = torch.randint(0, 300, (count,), generator=random)
    scores = (torch.rand(count, generator=random) * 20).round() / 20
    labels = (torch.rand(count, generator=random) < 0.15).float()
    return scores, labels, groups, torch.rand(count, generator=random) + 0.1


def test_the_order_of_the_log_does_not_matter() -> None:
    parts = rows()
    order = torch.randperm(len(parts[0]), generator=torch.Generator().manual_seed(1))
    assert topk(*(t[order] for t in parts)) == pytest.approx(topk(*parts), abs=1e-12)


def test_what_is_left_out() -> None:
    scores, labels, groups, weights = rows()
    wanted = topk(scores, labels, groups, weights)
    assert topk(scores, labels, groups, 7 * weights) == pytest.approx(wanted)
    assert topk(scores, labels, groups, torch.full_like(weights, 0.2)) == pytest.approx(
        topk(scores, labels, groups)
    )

    def joined(extra: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(
            torch.cat([a, b]) for a, b in zip((scores, labels, groups, weights), extra, strict=True)
        )

    nobody = torch.full((50,), 0.99), torch.ones(50), -1 - torch.arange(50), torch.ones(50)
    assert topk(*joined(nobody)) == pytest.approx(wanted)
    weightless = torch.full((50,), 0.99), torch.ones(50), groups[:50], torch.zeros(50)
    assert topk(*joined(weightless)) == pytest.approx(wanted)
    unclicked = torch.rand(50), torch.zeros(50), 1000 + torch.arange(50), torch.ones(50)
    got = topk(*joined(unclicked))
    assert got.pop("groups_without_positive") == wanted.pop("groups_without_positive") + 50
    assert got == pytest.approx(wanted)


def test_undefined_is_nan() -> None:
    empty, none = torch.empty(0), torch.empty(0, dtype=torch.int64)
    one, group = torch.ones(2), torch.zeros(2, dtype=torch.int64)
    for got in (
        topk(empty, empty, none),
        topk(one, 0 * one, group),
        topk(one * math.nan, one, group),
    ):
        assert got.pop("ranked_groups") == 0
        assert got.pop("groups_without_positive") in (0, 1)
        assert all(map(math.isnan, got.values()))


@pytest.mark.parametrize("k", [0, -3])
def test_bad_settings(k: int) -> None:
    one = torch.ones(2)
    with pytest.raises(UserError, match=f"k: {k};"):
        topk(one, one, one.long(), ks=[5, k])
    with pytest.raises(UserError, match="groups: shape"):
        topk(one, one, torch.zeros(3, dtype=torch.int64))
