from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from sparrow.apps.generate.truth import Truth
from sparrow.core import Batch, KeyedJagged
from sparrow.metrics import evaluate

ROWS = 40_000


def drawn(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    p = (1 / (1 + np.exp(-random.normal(-1.5, 1.6, ROWS)))).astype(np.float32)
    return p, (random.random(ROWS) < p).astype(np.int8), random.integers(1, 9, ROWS).cumsum() // 8


def judged(first: int, cuts: list[int], *, exact: bool) -> dict[str, float]:
    p, labels, sessions = drawn()
    starts = np.searchsorted(sessions, sessions)  # of each row's session
    truth = Truth(int(starts[first]), exact=exact)
    edges = [int(starts[cut]) for cut in [0, *cuts]] + [ROWS]
    for low, high in itertools.pairwise(edges):
        truth.add(low, p[low:high], labels[low:high], sessions[low:high])
    return truth.result()


@pytest.mark.parametrize("first", [0, 12_345])
@pytest.mark.parametrize("cuts", [[], [1000, 12_300, 12_400, 39_990]])
def test_it_is_what_evaluate_says_of_all_rows_at_once(first: int, cuts: list[int]) -> None:
    p, labels, sessions = drawn()
    first = int(np.searchsorted(sessions, sessions[first]))
    p_B, y_B, s_B = (torch.from_numpy(x[first:]) for x in (p, labels, sessions))
    ids = KeyedJagged.from_lists({})
    batch = Batch(dense_BC=p_B[:, None], ids=ids, labels_BT=y_B[:, None], session_B=s_B)
    expected = evaluate(lambda batch: batch.dense_BC, [batch])
    found = judged(first, cuts, exact=True)
    assert {"auc", "gauc", "logloss", "ne", "calibration", "examples"} <= found.keys()
    expected = {name: expected[name] for name in found}
    assert found == pytest.approx(expected, rel=1e-12)
    binned = judged(first, cuts, exact=False)
    assert binned == pytest.approx(expected, rel=1e-6)
    assert binned["auc"] != expected["auc"]  # so the bins were used, and what they lose is seen


def test_one_outcome_has_no_auc() -> None:
    truth = Truth(0, exact=True)
    truth.add(0, np.full(3, 0.5, np.float32), np.zeros(3, np.int8), np.arange(3))
    found = truth.result()
    assert math.isnan(found["auc"]) and math.isnan(found["gauc"]) and found["gauc_groups"] == 0
    assert found["logloss"] == pytest.approx(math.log(2))
