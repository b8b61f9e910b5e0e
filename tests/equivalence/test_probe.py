"""A probe on many ranks has learnt what one has learnt from all rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sparrow.extensions.low_precision import probe
from sparrow.extensions.low_precision.probe import FILE, Probe
from tests.equivalence import cases
from tests.equivalence.pool import Pool

pytestmark = pytest.mark.multi


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_together_learn_what_one_does(
    ranks: Callable[[int], Pool], tmp_path: Path, size: int
) -> None:
    """Rank 0 has no rows of the second product, and ranks have unequal shares. The third is of two
    activations.
    """
    ranks(size).run(cases.probed, str(tmp_path))
    found, step = probe.load(tmp_path / FILE)
    assert step == 3
    one = Probe(torch.nn.Linear(1, 1), 64)
    for name, of in cases.operands(size):
        one.see(name, of)
    assert found.keys() == one.learned.keys() == {"a", "b", "c"}
    for name, learned in found.items():
        for which in ("x", "grad"):
            ours, whole = getattr(learned, which), getattr(one.learned[name], which)
            assert ours.count == whole.count
            torch.testing.assert_close(ours.mean, whole.mean)
            assert (
                float((ours.scatter[0] - whole.scatter[0]).norm() / whole.scatter[0].norm()) < 1e-5
            )
