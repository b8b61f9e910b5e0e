from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from sparrow.core import Batch, KeyedJagged, UserError
from sparrow.extensions.blend import logistic
from sparrow.extensions.blend.deep import PiecewiseLinear
from sparrow.extensions.blend.logistic import Logistic
from sparrow.losses import binary_cross_entropy

ROWS = (6, 9)
# two ranges of each number; the last has no width
KNOTS = torch.tensor([[-1.0, 0.0, 1.0], [-2.0, 0.5, 0.5]])


def logits(model: Logistic, batch: Batch) -> torch.Tensor:
    return model(batch.ids, batch.dense_BC, KNOTS)


def fit(model: Logistic, train: Batch, valid: Batch, offset: float = 0.0) -> None:
    model.fit((train, valid), KNOTS, (torch.tensor([offset]),) * 2)


def examples(count: int, seed: int, signal: float = 1.0) -> Batch:
    """An id, a list of 0 to 3 ids, and two numbers; and what a label hangs on."""
    random = torch.Generator().manual_seed(seed)
    one_N, lengths_N = (
        torch.randint(0, 6, (count,), generator=random),
        torch.randint(0, 4, (count,), generator=random),
    )
    values = torch.cat([one_N, torch.randint(0, 9, (int(lengths_N.sum()),), generator=random)])
    ids = KeyedJagged(
        keys=("one", "some"),
        values_N=values,
        lengths=torch.cat([torch.ones_like(one_N), lengths_N]),
    )
    x_N2 = torch.randn(count, 2, generator=random)
    logit_N = signal * (one_N.float() - 2.5 + x_N2[:, 0].abs())
    label_N = (torch.rand(count, generator=random) < torch.sigmoid(logit_N)).float()
    return Batch(dense_BC=x_N2, ids=ids, labels_BT=label_N[:, None])


def design(batch: Batch) -> np.ndarray:
    """Shares of ids, the numbers, and how far they are through each range, by hand."""
    found = np.zeros((batch.batch_size, sum(ROWS) + 2 + 4))
    for key, first in (("one", 0), ("some", 6)):
        jagged = batch.ids[key]
        for row, (low, high) in enumerate(
            zip(jagged.offsets_B1, jagged.offsets_B1[1:], strict=False)
        ):
            for value in jagged.values_N[low:high].tolist():
                found[row, first + value] += 1 / int(high - low)
    numbers = PiecewiseLinear(2, 2, 1)
    numbers.knots_CK1 = KNOTS
    found[:, -6:-4], found[:, -4:] = batch.dense_BC, numbers.encode(batch.dense_BC).flatten(1)
    return found


def test_it_is_what_scikit_learn_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    sklearn = pytest.importorskip("sklearn.linear_model", reason="scikit-learn is not installed")
    monkeypatch.setattr(logistic, "PENALTIES", (3.0,))
    train, valid = examples(1500, 0), examples(400, 1)
    model = Logistic(ROWS, 2, 2, 1)
    fit(model, train, valid, 0.7)
    theirs = sklearn.LogisticRegression(C=1 / 3.0, tol=1e-8, max_iter=5000)
    theirs.fit(design(train), train.labels_BT[:, 0])
    want = theirs.decision_function(design(valid))
    np.testing.assert_allclose(logits(model, valid)[:, 0] + 0.7, want, atol=5e-3)


@pytest.mark.parametrize("piece", [1, 7, 100])
def test_a_design_that_is_made_in_pieces_is_the_same_to_the_bit(
    monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    """And so is its transpose, and what is fitted. Some pieces have no ids of a list, and the last
    has fewer rows.
    """
    train, valid = examples(100, 0), examples(31, 1)
    designs: list[list[torch.Tensor]] = []
    states = []
    make, turn = Logistic._design, logistic._transposed

    def parts_of(matrix: torch.Tensor) -> list[torch.Tensor]:
        return [matrix.crow_indices(), matrix.col_indices(), matrix.values()]

    def make_and_keep(model: Logistic, *given: Any) -> torch.Tensor:
        design = make(model, *given)
        designs.append(parts_of(design) + parts_of(turn(design)))
        return design

    monkeypatch.setattr(Logistic, "_design", make_and_keep)
    for rows in (1000, piece):
        monkeypatch.setattr(logistic, "PIECE", rows)
        model = Logistic(ROWS, 2, 2, 1)
        fit(model, train, valid)
        states.append(list(model.state_dict().values()))
    whole, pieces = designs[:2], designs[2:]
    assert all(map(torch.equal, itertools.chain(*whole), itertools.chain(*pieces)))
    assert all(map(torch.equal, *states))
    for matrix in whole:  # in one piece it is what torch transposes
        design = torch.sparse_csr_tensor(*matrix[:3], (len(matrix[0]) - 1, sum(ROWS) + 2 + 6))
        assert torch.equal(
            design.to_dense().T, torch.sparse_csr_tensor(*matrix[3:], design.shape[::-1]).to_dense()
        )


def test_weights_of_rows_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of weight 2 is like two rows."""
    monkeypatch.setattr(logistic, "PENALTIES", (3.0,))
    train, valid = examples(600, 0), examples(100, 1)
    twice = Batch(
        dense_BC=train.dense_BC,
        ids=train.ids,
        labels_BT=train.labels_BT,
        weights_B=torch.ones(600) * 2,
    )
    found = []
    for batch in (train, twice):
        model = Logistic(ROWS, 2, 2, 1)
        fit(model, batch, valid)
        found.append(logits(model, valid))
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)


def test_valid_rows_choose_the_penalty() -> None:
    """Where ids say nothing, the largest; where they say much, a smaller one. It is no worse than
    the first tried.
    """
    chosen = []
    for signal in (0.0, 2.0):
        train, valid = examples(400, 0, signal), examples(400, 1, signal)
        model = Logistic(ROWS, 2, 2, 1)
        fit(model, train, valid)
        chosen.append(float(binary_cross_entropy(logits(model, valid), valid)))
    assert chosen[0] == pytest.approx(0.693, abs=0.01)  # a coin
    assert chosen[1] < 0.4


def test_hashes_are_taken_modulo_the_rows() -> None:
    model = Logistic((5,), 0, 4, 1)
    model.ids_RT = torch.arange(5.0)[:, None]
    ids = KeyedJagged(
        keys=("one",),
        values_N=torch.tensor([7, 2**62 + 3, 4]),
        lengths=torch.ones(3, dtype=torch.long),
    )
    none = torch.zeros(3, 0)
    found = model(ids, none, torch.zeros(0, 5))
    assert found[:, 0].tolist() == [2.0, float((2**62 + 3) % 5), 4.0]


def test_weights_of_other_ids_are_refused() -> None:
    """As when a run goes on with a log that has grown."""
    one, same, grown = (
        Logistic((6, 9), 2, 2, 1),
        Logistic((6, 9), 2, 2, 1),
        Logistic((7, 9), 2, 2, 1),
    )
    fit(one, examples(200, 0), examples(100, 1))
    same.load_state_dict(one.state_dict())
    assert torch.equal(logits(same, examples(50, 2)), logits(one, examples(50, 2)))
    with pytest.raises(UserError, match="of 15 ids, and this log has 16; train without init_from"):
        grown.load_state_dict(one.state_dict())
