from __future__ import annotations

import numpy as np
import pytest
import torch

from sparrow.core import Batch, KeyedJagged
from sparrow.extensions.blend.targets import TargetMeans
from sparrow.metrics import auc


def rows(labels_NT: torch.Tensor, weights_N: torch.Tensor | None = None) -> Batch:
    size = len(labels_NT)
    none = KeyedJagged(
        keys=(),
        values_N=torch.zeros(0, dtype=torch.int64),
        lengths=torch.zeros(0, dtype=torch.int64),
    )
    return Batch(dense_BC=torch.zeros(size, 0), ids=none, labels_BT=labels_NT, weights_B=weights_N)


@pytest.mark.parametrize("weighed", [False, True])
def test_means_are_those_of_other_rows(weighed: bool) -> None:
    """By hand, id by id: what a row is told is the same whatever its own label is."""
    random = torch.Generator().manual_seed(0)
    ids_NS = torch.randint(0, 6, (300, 2), generator=random)
    labels_NT = torch.randint(0, 2, (300, 2), generator=random).float()
    weights_N = torch.rand(300, generator=random) + 0.5 if weighed else None
    targets = TargetMeans((6, 6), 2)
    told_NX = targets.fit(ids_NS, rows(labels_NT, weights_N), seed=0)
    w_N = torch.ones(300) if weights_N is None else weights_N
    prior_T = (labels_NT * w_N[:, None]).sum(0) / w_N.sum()
    has_N = ids_NS[:, 1] == 4
    mean_T = ((labels_NT * w_N[:, None])[has_N].sum(0) + 20 * prior_T) / (w_N[has_N].sum() + 20)
    at = targets(torch.tensor([[0, 4]]))[0]
    torch.testing.assert_close(at[3:], torch.cat([mean_T, w_N[has_N].sum()[None]]))
    for row in (0, 17):
        others = labels_NT.clone()
        others[row] = 1 - others[row]
        again_NX = TargetMeans((6, 6), 2).fit(ids_NS, rows(others, weights_N), seed=0)
        changed = float((again_NX[row] - told_NX[row]).abs().max())
        # by the mean of all rows alone
        assert changed < 0.005 and float((again_NX - told_NX).abs().max()) > changed


def test_rows_without_a_label_are_left_out_of_its_mean() -> None:
    random = torch.Generator().manual_seed(1)
    ids_NS = torch.randint(0, 5, (200, 1), generator=random)
    labels_NT = torch.randint(0, 2, (200, 2), generator=random).float()
    labels_NT[::3, 1] = torch.nan
    known_N = torch.arange(200) % 3 > 0
    both, alone = TargetMeans((5,), 2), TargetMeans((5,), 1)
    assert torch.isfinite(both.fit(ids_NS, rows(labels_NT), seed=0)).all()
    alone.fit(ids_NS[known_N], rows(labels_NT[known_N][:, 1:]), seed=0)
    torch.testing.assert_close(both.mean_RT[:, 1], alone.mean_RT[:, 0])
    assert both.count_R.tolist() == torch.bincount(ids_NS[:, 0], minlength=5).tolist()


def test_a_coin_tells_nothing() -> None:
    """Ids with a row each or two would tell the labels, if their own labels counted."""
    random = np.random.default_rng(0)
    ids_NS = torch.from_numpy(random.integers(0, 5000, (10_000, 1)))
    labels_NT = torch.from_numpy(random.integers(0, 2, (10_000, 1)).astype(np.float32))
    told_NX = TargetMeans((5000,), 1).fit(ids_NS, rows(labels_NT), seed=1)
    assert auc(told_NX[:, 0], labels_NT[:, 0]) == pytest.approx(0.5, abs=0.02)
    leaks = TargetMeans((5000,), 1)
    leaks.fit(ids_NS, rows(labels_NT), seed=1)
    assert auc(leaks(ids_NS)[:, 0], labels_NT[:, 0]) > 0.7  # so that it would show


def test_ids_beyond_a_table_are_taken_modulo_its_rows() -> None:
    targets = TargetMeans((3, 4), 1)
    targets.fit(torch.tensor([[1, 3], [2, 0]]), rows(torch.tensor([[1.0], [0.0]])), seed=0)
    torch.testing.assert_close(
        targets(torch.tensor([[1 + 3, 3 + 4 * 10**12]])), targets(torch.tensor([[1, 3]]))
    )
