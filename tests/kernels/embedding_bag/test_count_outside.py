from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from sparrow.kernels import Impl, embedding_bag
from tests.kernels.embedding_bag.cases import IMPLS, built, spread


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_count_outside(impl: Impl, dtype: torch.dtype) -> None:
    slots_N = torch.tensor([0, 4, 5, -1, -7, 2**31 - 1, 3, 9], dtype=dtype)
    for slots in (slots_N, spread(slots_N)):
        counts_K = embedding_bag.count_outside(slots, [0, 4, 4, 6, 8], [5, 1, -1, 4], impl=impl)
        assert counts_K.dtype == torch.int64
        assert counts_K.tolist() == [2, 0, 0, 1]
    assert embedding_bag.count_outside(slots_N[:0], [0], [], impl=impl).tolist() == []


@built
def test_count_outside_on_any_number_of_threads(threads: Callable[[int], None]) -> None:
    slots_N, bounds = torch.randint(-100, 1000, (300_000,)), [0, 5, 5, 150_001, 300_000]
    expected_K = embedding_bag.count_outside(slots_N, bounds, [900, 3, 500, 900], impl="reference")
    for count in (1, 2, 3):
        threads(count)
        assert torch.equal(
            embedding_bag.count_outside(slots_N, bounds, [900, 3, 500, 900], impl="cpp"), expected_K
        )
