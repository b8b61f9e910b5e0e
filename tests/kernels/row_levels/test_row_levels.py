from __future__ import annotations

from typing import Any

import pytest
import torch

from sparrow.kernels import Impl, missing, row_levels

built = pytest.mark.skipif(bool(missing()), reason=f"{missing()}: run `make setup`")
IMPLS: list[Any] = ["reference", pytest.param("cpp", marks=built)]
NONE = torch.zeros(0, dtype=torch.int64)


@pytest.mark.parametrize("impl", IMPLS)
def test_slots_are_as_they_are_defined(impl: Impl) -> None:
    above, below = [torch.tensor([0, 3, 9]), NONE, torch.tensor([2])], [8, 5, 2]
    rows = torch.tensor([0, 1, 3, 9, 3, 4, 2, 1])
    for rows_N in (rows, rows.int()):
        slots = row_levels.slots_of(rows_N, [0, 5, 6, 8], above, below, impl=impl)
        assert slots.dtype == torch.int64 and slots.tolist() == [8, 1, 9, 10, 9, 4, 2, 1]
    assert rows.tolist() == [0, 1, 3, 9, 3, 4, 2, 1]  # what it was given stays
    assert row_levels.slots_of(NONE, [0, 0, 0, 0], above, below, impl=impl).numel() == 0


@built
@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 8, 1000, 4096])
def test_the_compiled_search_is_the_reference(count: int, threads: Any) -> None:
    """At every size of the level above, beside rows that come before and after all of it, on many threads."""
    threads(3)
    random = torch.Generator().manual_seed(count)
    above = [(torch.randperm(9000, generator=random)[:count] + 5).sort().values for _ in range(3)]
    rows_N = torch.randint(0, 9100, (30_001,), generator=random)
    bounds, below = [0, 10_000, 10_000, 30_001], [10_000, 1, 7]
    mine = row_levels.slots_of(rows_N, bounds, above, below, impl="cpp")
    assert torch.equal(mine, row_levels.slots_of(rows_N, bounds, above, below, impl="reference"))
