from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score
from torch import Tensor

from sparrow.core import UserError
from sparrow.metrics import auc, gauc

ROWS = st.lists(
    st.tuples(st.integers(-3, 3), st.integers(0, 1), st.floats(0.01, 4), st.integers(-2, 2)),
    min_size=1,
    max_size=60,
)


def tensors(rows: list) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    scores, labels, weights, groups = (torch.tensor(column) for column in zip(*rows, strict=True))
    return scores / 3, labels, weights.double(), groups


def by_sklearn(scores: Tensor, labels: Tensor, weights: Tensor | None = None) -> float:
    if labels.min() == labels.max():
        return math.nan
    return float(
        roc_auc_score(
            labels.numpy(), scores.numpy(), sample_weight=None if weights is None else weights
        )
    )


@given(ROWS)
def test_auc_is_sklearns(rows: list) -> None:
    scores, labels, weights, _ = tensors(rows)
    assert auc(scores, labels) == pytest.approx(by_sklearn(scores, labels), abs=1e-12, nan_ok=True)
    assert auc(scores, labels, weights) == pytest.approx(
        by_sklearn(scores, labels, weights), abs=1e-9, nan_ok=True
    )


@given(ROWS, st.booleans())
def test_gauc_is_a_loop_over_groups(rows: list, weighted: bool) -> None:
    scores, labels, weights, groups = tensors(rows)
    above = below = 0.0
    counted = 0
    for group in groups.unique():
        rows_of = groups == group
        value = by_sklearn(scores[rows_of], labels[rows_of], weights[rows_of] if weighted else None)
        if not math.isnan(value):
            impressions = float(weights[rows_of].sum()) if weighted else int(rows_of.sum())
            above, below, counted = above + impressions * value, below + impressions, counted + 1
    got = gauc(scores, labels, groups, weights if weighted else None)
    assert (got.counted, got.groups) == (counted, groups.unique().numel())
    assert got.value == pytest.approx(above / below if counted else math.nan, abs=1e-9, nan_ok=True)


def test_many_rows() -> None:
    torch.manual_seed(0)
    scores, groups = torch.rand(50_000, dtype=torch.float64), torch.randint(0, 9000, (50_000,))
    labels = torch.bernoulli(scores)
    assert auc(scores, labels) == pytest.approx(by_sklearn(scores, labels), abs=1e-12)
    assert gauc(scores + groups, labels, groups).value == pytest.approx(
        gauc(scores, labels, groups).value, abs=1e-12
    )
    # the control: only GAUC is blind to what a group adds
    assert auc(scores + groups, labels) < 0.6


def test_without_rows_and_with_nan() -> None:
    empty = torch.empty(0)
    assert math.isnan(auc(empty, empty))
    assert gauc(empty, empty, empty.long())[1:] == (0, 0)
    assert math.isnan(auc(torch.tensor([0.1, math.nan]), torch.tensor([0, 1])))


@pytest.mark.parametrize(
    ("labels", "weights", "says"),
    [
        ([0.0, 2.0], None, "labels: 2 in row 1"),
        ([math.nan, 1.0], None, "labels: nan in row 0"),
        ([0.0, 1.0, 1.0], None, "labels: shape"),
        ([0.0, 1.0], [1.0, -1.0], "weights: -1 in row 1"),
        ([0.0, 1.0], [math.inf, 1.0], "weights: inf in row 0"),
    ],
)
def test_bad_columns(labels: list, weights: list | None, says: str) -> None:
    with pytest.raises(UserError, match=says):
        auc(
            torch.tensor([0.1, 0.2]),
            torch.tensor(labels),
            None if weights is None else torch.tensor(weights),
        )


def test_groups_must_fit() -> None:
    with pytest.raises(UserError, match="groups"):
        gauc(torch.rand(3), torch.ones(3), torch.zeros(2, dtype=torch.int64))
