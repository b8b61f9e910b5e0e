from __future__ import annotations

import pytest
import torch

from sparrow.kernels import Impl, missing, row_write

COMPILED = pytest.param("cpp", marks=pytest.mark.skipif(bool(missing()), reason=missing()))


@pytest.mark.parametrize("impl", ["reference", COMPILED])
@pytest.mark.parametrize("count", [0, 1, 7])
def test_some_rows_get_values_and_the_others_stay(impl: Impl, count: int) -> None:
    """Fields of any type and width, with a value for each row or one for all."""
    rows_L = torch.randperm(9)[:count]
    fields = [
        torch.full((9, 3), 0.5),
        torch.zeros(9, dtype=torch.uint8),
        torch.zeros(9, 2, dtype=torch.int64),
    ]
    expected = [field.clone() for field in fields]
    values = [
        torch.rand(count, 3),
        torch.ones(1, dtype=torch.uint8),
        torch.arange(2 * count).view(2, count).T,
    ]
    for row, place in enumerate(rows_L.tolist()):
        expected[0][place], expected[1][place], expected[2][place] = (
            values[0][row],
            1,
            values[2][row],
        )
    row_write.write(fields, values, rows_L, impl=impl)
    assert all(torch.equal(*pair) for pair in zip(fields, expected, strict=True))
