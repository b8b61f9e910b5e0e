from __future__ import annotations

from typing import Any

import pytest
import torch

from sparrow.kernels import Impl, missing, row_levels
from sparrow.kernels.row_levels import places_of

built = pytest.mark.skipif(bool(missing()), reason=f"{missing()}: run `make setup`")
IMPLS: list[Any] = ["reference", pytest.param("cpp", marks=built)]


@pytest.mark.parametrize("impl", IMPLS)
def test_slots_are_as_they_are_defined(impl: Impl) -> None:
    """Of three keys, of which one has no level above and one shares the words of another
    table's.
    """
    places_W2 = torch.cat([places_of(torch.tensor([2]), 3), places_of(torch.tensor([0, 3, 9]), 10)])
    begins, below = [1, -1, 0], [8, 5, 2]
    rows = torch.tensor([0, 1, 3, 9, 3, 4, 2, 1])
    for rows_N in (rows, rows.int()):
        slots = row_levels.slots_of(rows_N, [0, 5, 6, 8], places_W2, begins, below, impl=impl)
        assert slots.dtype == torch.int64 and slots.tolist() == [8, 1, 9, 10, 9, 4, 2, 1]
    assert rows.tolist() == [0, 1, 3, 9, 3, 4, 2, 1]  # what it was given stays
    assert (
        row_levels.slots_of(rows[:0], [0, 0, 0, 0], places_W2, begins, below, impl=impl).numel()
        == 0
    )


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("rows", [1, 63, 64, 65, 128, 9000])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 1.0])
def test_slots_are_those_of_a_map(share: float, rows: int, impl: Impl, threads: Any) -> None:
    """At every size of the level above, on many threads."""
    threads(3)
    random = torch.Generator().manual_seed(rows)
    above = [
        torch.randperm(rows, generator=random)[: round(share * rows)].sort().values
        for _ in range(3)
    ]
    rows_N = torch.randint(0, rows, (30_001,), generator=random)
    bounds, below, words = (
        [0, 10_000, 10_000, 30_001],
        [rows, 1, 7],
        [places_of(rows_U, rows) for rows_U in above],
    )
    begins = [k * len(words[0]) for k in range(3)]
    found = row_levels.slots_of(rows_N, bounds, torch.cat(words), begins, below, impl=impl)
    for k, rows_U in enumerate(above):
        map_R = torch.arange(rows)
        map_R[rows_U] = below[k] + torch.arange(len(rows_U))
        part = slice(bounds[k], bounds[k + 1])
        assert torch.equal(found[part], map_R[rows_N[part]])


@built
@pytest.mark.parametrize("row", [-1, 64, 1 << 40])
def test_a_row_that_is_nowhere_is_refused(row: int) -> None:
    with pytest.raises(ValueError, match="expected rows that are on the levels"):
        row_levels.slots_of(
            torch.tensor([row]), [0, 1], places_of(torch.tensor([2]), 3), [0], [2], impl="cpp"
        )
