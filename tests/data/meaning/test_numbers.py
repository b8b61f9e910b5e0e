from __future__ import annotations

import numpy as np
import pytest

from sparrow.data.meaning.numbers import is_count, is_uneven, tells_apart

N = 3000
RNG = np.random.default_rng(5)


def some(count: int, low: int, high: int) -> np.ndarray:
    return RNG.choice(RNG.choice(np.arange(low, high), count, replace=False), N)


@pytest.mark.parametrize(
    ("x_N", "uneven"),
    [
        pytest.param(some(900, 1, 30_000_000), True, id="ids of a wide range"),
        pytest.param(some(300, -9000, 9000), True, id="ids below nought"),
        pytest.param(
            (RNG.pareto(1.0, N) * 20).astype(np.int64) * 7919 % 997, True, id="popular ids"
        ),
        pytest.param(RNG.integers(18, 90, N), False, id="ages"),
        pytest.param(5 * RNG.integers(100, 160, N), False, id="steps of five"),
        pytest.param(RNG.geometric(0.1, N), False, id="counts"),
        pytest.param(RNG.geometric(0.5, N), False, id="small counts"),
        pytest.param(
            RNG.normal(50_000, 9000, N).astype(np.int64), False, id="measures of a wide range"
        ),
        pytest.param(RNG.choice([10, 19, 20, 25, 49, 50, 99, 100, 199], N), False, id="prices"),
        pytest.param(np.zeros(0, np.int64), False, id="nothing"),
    ],
)
def test_names_come_unevenly(x_N: np.ndarray, uneven: bool) -> None:
    assert is_uneven(x_N) == uneven


@pytest.mark.parametrize(
    ("values", "shares", "count"),
    [
        ([0, 1, 2, 3], [0.6, 0.25, 0.1, 0.05], True),
        ([1, 2, 3, 4, 9], [0.5, 0.3, 0.145, 0.05, 0.005], True),
        ([0, 1, 2, 3], [0.1, 0.25, 0.6, 0.05], False),
        ([0, 2, 3, 4], [0.6, 0.25, 0.1, 0.05], False),
        ([5, 6, 7, 8], [0.6, 0.25, 0.1, 0.05], False),
        ([0, 1], [0.9, 0.1], False),
        (list(range(8)), [0.05, 0.1, 0.15, 0.2, 0.17, 0.14, 0.11, 0.08], True),
        (list(range(8)), [0.05, 0.1, 0.2, 0.15, 0.11, 0.14, 0.17, 0.08], False),
    ],
)
def test_counts_have_one_peak(values: list[int], shares: list[float], count: bool) -> None:
    assert is_count(RNG.choice(values, N, p=shares)) == count


def test_names_tell_more_of_a_label_than_their_order() -> None:
    x_N = RNG.integers(0, 60, N)
    effects = RNG.normal(0, 1.5, 60)
    of_names, of_order = (
        RNG.random(N) < 1 / (1 + np.exp(-z)) for z in (effects[x_N], (x_N - 30) / 15)
    )
    assert tells_apart(x_N, of_names.astype(float))
    assert not tells_apart(x_N, of_order.astype(float))
    # nothing tells of this label
    assert not tells_apart(RNG.integers(0, 10**6, N), np.arange(N) % 2.0)
