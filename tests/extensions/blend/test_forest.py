from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from sparrow.core import Batch, KeyedJagged
from sparrow.extensions.blend import forest
from sparrow.extensions.blend.forest import WIDEST, Forest

NO_IDS = KeyedJagged(
    keys=(), values_N=torch.zeros(0, dtype=torch.long), lengths=torch.zeros(0, dtype=torch.long)
)


def examples(count: int, seed: int) -> tuple[Batch, torch.Tensor]:
    """Two numbers, of which one has ties, and an id whose order says nothing. The label is an
    exclusive or of them.
    """
    random = np.random.default_rng(seed)
    x = np.stack(
        [random.normal(size=count), random.integers(0, 8, count), random.integers(0, 40, count)], 1
    )
    odd = (x[:, 2].astype(int) * 7919 % 5) < 2
    label = (odd ^ (x[:, 1] > 3) ^ (x[:, 0] > 0.3)) ^ (random.random(count) < 0.1)
    made = Batch(
        dense_BC=torch.zeros(count, 0),
        ids=NO_IDS,
        labels_BT=torch.tensor(label, dtype=torch.float)[:, None],
    )
    return made, torch.tensor(x)


def grown() -> Forest:
    model, ((train, x_train), (valid, x_valid)) = (
        Forest([2], 1),
        (examples(6000, 0), examples(1000, 1)),
    )
    model.fit(
        (train, valid), (x_train, x_valid), (torch.tensor([0.4]),) * 2, trees=300, seed=0, threads=1
    )
    return model


def test_trees_are_those_of_lightgbm(monkeypatch: pytest.MonkeyPatch) -> None:
    lightgbm = pytest.importorskip("lightgbm", reason="needs the extra [trees]")
    boosters, train = [], lightgbm.train

    def kept(*given: object, **named: object) -> object:
        boosters.append(train(*given, **named))
        return boosters[-1]

    monkeypatch.setattr(lightgbm, "train", kept)
    model, (test, x) = grown(), examples(2000, 2)
    x[:50, 2] = torch.arange(50)  # ids that no tree has seen
    each = [
        one.predict(x.numpy(), raw_score=True, num_iteration=one.best_iteration) for one in boosters
    ]
    want = np.mean(each, 0)
    assert len(each) == 2 and np.abs(each[0] - each[1]).max() > 0.01
    np.testing.assert_allclose(model(x)[:, 0], want, rtol=1e-5, atol=1e-5)
    assert len(model.sets_SW) and (model.set_M < 0).any()  # splits of both kinds are there
    right = (torch.sigmoid(model(x)[:, 0] + 0.4) > 0.5) == (test.labels_BT[:, 0] > 0.5)
    assert right[50:].float().mean() > 0.85  # of 0.9 that are to be had
    assert model(x[:0]).shape == (0, 1)


def test_what_is_saved_is_loaded_into_a_forest_without_trees() -> None:
    pytest.importorskip("lightgbm", reason="needs the extra [trees]")
    one, other, (_, x) = grown(), Forest([2], 1), examples(100, 3)
    other.load_state_dict(one.state_dict())
    assert torch.equal(one(x), other(x)) and other.depth == one.depth > 1
    far = x.clone()
    far[:, 2] = WIDEST + 5  # an id beyond all sets
    assert torch.isfinite(one(far)).all()


def test_without_lightgbm_there_are_no_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lightgbm", None)
    assert not forest.available()
    assert Forest([], 2)(torch.zeros(3, 4)).tolist() == [[0.0, 0.0]] * 3


def test_trees_that_run_in_a_circle_are_refused() -> None:
    """A walk to their leaves would not end."""
    pytest.importorskip("lightgbm", reason="needs the extra [trees]")
    state = grown().state_dict()
    state["left_M"] = torch.zeros_like(state["left_M"])
    with pytest.raises(ValueError, match="its trees run in a circle"):
        Forest([2], 1).load_state_dict(state)
