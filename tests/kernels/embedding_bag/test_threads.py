"""C++ has the same bits on any number of threads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.kernels.embedding_bag.cases import (
    BIG,
    RULES,
    Shape,
    assert_close,
    assert_same,
    build,
    built,
    looked_up,
    updated,
)


@built
@pytest.mark.parametrize("shape", BIG)
def test_any_number_of_threads_has_the_same_bits(
    shape: str, threads: Callable[[int], None]
) -> None:
    dims = [16, 8, 33, 4, 100, 1]
    call = build(
        BIG[shape], dims, RULES["rowwise_adam, all"], levels=2 if shape == "shared table" else 1
    )
    exact, first = looked_up(call, "reference"), {}
    for count in (1, 2, 3):
        threads(count)
        assert_same(looked_up(call, "cpp"), exact, f"{count} threads")
        for fused in (True, False):
            after = updated(call, "cpp", fused=fused)
            first = first or after
            assert_same(after, first, f"{count} threads, fused: {fused}")
    assert_close(first, updated(call, "reference"), shape)


@built
@pytest.mark.parametrize(
    ("lookups", "rows"),
    [
        (20_000, 1),
        (20_000, 9_999),
        (20_000, 10_000),
        (20_000, 10_001),
        (140_000, 2**16),
        (140_000, 2**16 + 1),
    ],
)
def test_rows_about_half_as_many_as_lookups(
    lookups: int, rows: int, threads: Callable[[int], None]
) -> None:
    """From there on they are sorted in one pass, which has a counter for each row."""
    shape = Shape(keys=([5, 0, 14, 1] * (lookups // 20),), rows=(rows,))
    call = build(shape, [5], RULES["rowwise_adagrad, plain"])
    close, first = updated(call, "reference"), {}
    for count in (1, 2, 3):
        threads(count)
        for fused in (True, False):
            after = updated(call, "cpp", fused=fused)
            first = first or after
            assert_same(after, first, f"{count} threads, fused: {fused}")
    assert_close(first, close, f"{rows} rows")


@pytest.mark.slow
@built
@pytest.mark.parametrize("rows", [2**21 + 5, 2**22 + 1])
def test_millions_of_lookups(rows: int, threads: Callable[[int], None]) -> None:
    shape = Shape(keys=([50, 0, 1, 49] * 50_000,), rows=(rows,))
    assert sum(shape.keys[0]) >= 5_000_000
    call = build(shape, [5], RULES["rowwise_adagrad, plain"], dtype=torch.int32)
    exact, close = looked_up(call, "reference"), updated(call, "reference")
    for count in (1, 2):
        threads(count)
        assert_same(looked_up(call, "cpp"), exact, f"{count} threads")
        assert_close(updated(call, "cpp"), close, f"{count} threads")
