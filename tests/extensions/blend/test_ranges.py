from __future__ import annotations

import pytest
import torch

from sparrow.extensions.blend.deep import PiecewiseLinear
from sparrow.extensions.blend.ranges import choose_knots, locate


def test_a_number_is_in_a_range_and_so_far_through_it() -> None:
    knots_CK1 = torch.tensor([[0.0, 1.0, 3.0, 4.0, 4.0]])  # the last range has no width
    x_B1 = torch.tensor([[-5.0], [0.0], [0.5], [2.0], [4.0], [9.0]])
    range_B1, through_B1 = locate(x_B1, knots_CK1)
    assert (range_B1 + through_B1)[:, 0].tolist() == [0, 0, 0.5, 1.5, 3, 3]


def test_ranges_hold_equally_many_rows() -> None:
    x_N = torch.randn(4001, generator=torch.Generator().manual_seed(0)).exp()
    knots_CK1 = choose_knots(torch.stack([x_N, torch.zeros(4001)], 1), 8)
    (counts,) = torch.histogram(x_N, knots_CK1[0])[:1]
    assert counts.tolist() == pytest.approx([500] * 8, abs=2)
    assert knots_CK1[1].tolist() == [0.0] * 9  # a column of one value


def test_few_values_have_a_range_each() -> None:
    """So every function of them is linear in the ranges, however unequal their shares are."""
    numbers = PiecewiseLinear(1, 32, 3)
    x_N = torch.tensor([0.0] * 900 + [1.0] * 50 + [5.0] * 30 + [7.0] * 20)
    numbers.fit(x_N[:, None])
    values = x_N.unique()[:, None]
    design = torch.cat([numbers.encode(values)[:, 0], torch.ones(4, 1)], 1)
    assert torch.linalg.matrix_rank(design) == 4
