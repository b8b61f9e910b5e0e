from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.inspection import permutation_importance
from sklearn.metrics import log_loss, roc_auc_score

from sparrow.analysis.importance import measure_importance
from sparrow.core import Batch, KeyedJagged
from sparrow.features.schema import Column, Encoding, Schema


def planted(rows: int = 3000) -> tuple[Batch, Schema]:
    """Dense a, b and c, id k, list h; the second and the last of them carry the label, see
    `score`.
    """
    rng = torch.Generator().manual_seed(0)
    dense_BC = torch.randn(rows, 3, generator=rng)
    k_B = torch.randint(0, 5, (rows,), generator=rng)
    lengths_B = torch.randint(0, 4, (rows,), generator=rng)
    h_N = torch.randint(0, 2, (int(lengths_B.sum()),), generator=rng)
    ids = KeyedJagged(
        keys=("k", "h"),
        values_N=torch.cat([k_B, h_N]),
        lengths=torch.cat([torch.ones_like(k_B), lengths_B]),
    )
    batch = Batch(dense_BC=dense_BC, ids=ids)
    labels_B = (torch.rand(rows, generator=rng) < score(batch)).float()
    names = {name: Column(kind="numeric") for name in "abc"}
    names |= {"k": Column(kind="categorical", table="k"), "h": Column(kind="list", table="h")}
    schema = Schema(columns=names, encodings={"k": Encoding(), "h": Encoding()})
    return dataclasses.replace(batch, labels_BT=labels_B[:, None]), schema


def score(batch: Batch) -> torch.Tensor:
    h = batch.ids["h"]
    row_N = torch.arange(batch.batch_size).repeat_interleave(h.lengths_B)
    ones_B = torch.zeros(batch.batch_size).index_add_(0, row_N, 2.0 * h.values_N - 1)
    return torch.sigmoid(2 * batch.dense_BC[:, 1] + 0.5 * batch.dense_BC[:, 0] + 0.7 * ones_B)


def test_what_carries_the_signal_comes_first_and_what_is_not_used_is_nothing() -> None:
    batch, schema = planted()
    before = batch.dense_BC.clone()
    found = measure_importance(score, batch, schema, batch_size=256, repeats=4)
    assert [one.column for one in found[:3]] == ["b", "h", "a"]
    by_name = {one.column: one for one in found}
    for unused in ("c", "k"):
        assert by_name[unused].ne == by_name[unused].auc == by_name[unused].ne_spread == 0
    assert by_name["b"].auc > 0.1 and by_name["b"].ne > 0.2 and 0 < by_name["b"].ne_spread < 0.1
    assert torch.equal(batch.dense_BC, before)
    again = measure_importance(score, batch, schema, batch_size=999, repeats=4)
    assert {one.column: one.auc for one in again} == pytest.approx(
        {one.column: one.auc for one in found}
    )


def test_importance_is_sklearns() -> None:
    batch, schema = planted()

    class Model:
        classes_ = np.array([0, 1])

        def fit(self, x: Any, y: Any) -> None: ...

        def predict_proba(self, x: Any) -> Any:
            dense_BC = torch.tensor(x[:, :3], dtype=torch.float32)
            p = score(dataclasses.replace(batch, dense_BC=dense_BC)).numpy()
            return np.stack([1 - p, p], 1)

    assert batch.labels_BT is not None
    y = batch.labels_BT[:, 0].numpy()
    entropy = log_loss(y, np.full(len(y), y.mean()))
    scorers = {
        "auc": lambda model, x, y: roc_auc_score(y, model.predict_proba(x)[:, 1]),
        "ne": lambda model, x, y: (
            -log_loss(y, model.predict_proba(x)[:, 1].astype(float)) / entropy
        ),
    }
    theirs = permutation_importance(
        Model(), batch.dense_BC.numpy(), y, scoring=scorers, n_repeats=20, random_state=0
    )
    ours = {
        one.column: one
        for one in measure_importance(score, batch, schema, batch_size=500, repeats=20, seed=1)
    }
    for c, name in enumerate("abc"):
        for metric in ("auc", "ne"):
            mean, spread = theirs[metric].importances_mean[c], theirs[metric].importances_std[c]
            assert getattr(ours[name], metric) == pytest.approx(
                mean, abs=4 * spread / math.sqrt(20) + 1e-6
            ), name
            assert getattr(ours[name], f"{metric}_spread") == pytest.approx(
                spread, rel=0.6, abs=1e-6
            )


def test_features_of_one_raw_column_move_together() -> None:
    """Each tells all that the other does: alone, either could be shuffled at no cost."""
    batch, schema = planted()
    twice = {**schema.columns, "c": Column(kind="numeric", source="b")}
    batch = dataclasses.replace(batch, dense_BC=batch.dense_BC[:, [0, 1, 1]])

    def either(batch: Batch) -> torch.Tensor:
        b, c = batch.dense_BC[:, 1], batch.dense_BC[:, 2]
        return torch.sigmoid(2 * torch.where(b == c, b, batch.dense_BC[:, 0]))

    found = measure_importance(
        either, batch, dataclasses.replace(schema, columns=twice), batch_size=500
    )
    assert found[0].column == "b" and found[0].auc > 0.1
    assert "c" not in {one.column for one in found}
