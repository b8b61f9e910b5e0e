from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparrow.features import quantile
from sparrow.features.quantile import Ordered, bucketize, quantile_boundaries


@pytest.fixture(scope="module", autouse=True)
def small_runs():
    """Runs and samples so short that small examples need many of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantile, "RUN_VALUES", 7)
        patch.setattr(quantile, "_SAMPLE_EVERY", 3)
        yield


def ordered(folder: Path, chunks: list[np.ndarray], kind: type) -> Ordered:
    path = folder / "values"
    path.unlink(missing_ok=True)
    x = Ordered(path, kind)
    for chunk in chunks:
        x.add(chunk)
    return x


INTEGERS = st.one_of(st.integers(-3, 3), st.integers(-(2**63), 2**63 - 1))
FLOATS = st.one_of(
    st.integers(-3, 3).map(float), st.floats(allow_nan=False, allow_infinity=False, width=32)
)


@settings(max_examples=80)
@given(st.lists(st.lists(INTEGERS, max_size=30), max_size=6))
def test_every_place_is_that_of_the_sorted_integers(
    tmp_path_factory, chunks: list[list[int]]
) -> None:
    folder = tmp_path_factory.mktemp("ordered")
    x = ordered(folder, [np.array(chunk, np.int64) for chunk in chunks], np.int64)
    want = sorted(i for chunk in chunks for i in chunk)
    assert len(x) == len(want)
    assert x.at(range(len(want))).tolist() == want
    assert x.at([]).tolist() == []


@settings(max_examples=80)
@given(st.lists(FLOATS, min_size=1, max_size=80), st.integers(2, 20))
def test_buckets_end_at_the_inverse_of_the_empirical_distribution(
    tmp_path_factory, values, buckets: int
) -> None:
    x = ordered(tmp_path_factory.mktemp("ordered"), [np.array(values) + 0.0], np.float64)
    found = quantile_boundaries(x, buckets)
    ends = [max(v for v in values if v <= boundary) for boundary in found]
    shares = np.arange(1, buckets) / buckets
    want = set(np.quantile(values, shares, method="inverted_cdf").tolist()) - {max(values)}
    # elsewhere numpy's rounding may decide otherwise
    if all((k * len(values)) % buckets for k in range(1, buckets)):
        assert set(ends) == want
    assert (
        list(found) == sorted(set(found)) and ends == sorted(set(ends)) and len(ends) <= buckets - 1
    )
    for k in range(1, buckets):  # by the definition itself
        least = min(v for v in values if sum(w <= v for w in values) * buckets >= k * len(values))
        assert least in ends or least == max(values)
    for end, boundary in zip(ends, found, strict=True):
        following = min(v for v in values if v > end)
        middle = (Fraction(end) + Fraction(following)) / 2
        assert end <= boundary < following
        assert abs(Fraction(boundary) - middle) <= Fraction(
            np.spacing(max(abs(end), abs(following)))
        )


def test_floats_side_by_side_are_parted(tmp_path: Path) -> None:
    """Nothing lies between them, so the boundary is the lower one, whichever of them halfway is
    rounded to.
    """
    for low in (1.0, np.nextafter(1.0, 2.0)):
        pair = np.array([low, np.nextafter(low, 2.0)])
        (boundary,) = quantile_boundaries(ordered(tmp_path, [pair], np.float64), 2)
        assert boundary == low and bucketize(pair, (boundary,)).tolist() == [1, 2]


@given(
    st.lists(st.floats(0, 1e6, width=32), min_size=2, max_size=60, unique=True), st.integers(2, 20)
)
def test_numbers_of_a_float32_stay_in_their_buckets_when_they_are_written_or_rounded(
    tmp_path_factory, values, buckets
):
    x = np.array(values, np.float32)
    boundaries = quantile_boundaries(
        ordered(tmp_path_factory.mktemp("x"), [x.astype(np.float64)], np.float64), buckets
    )
    # as JSON has it: the shortest text that is this float32
    written = np.array([float(str(number)) for number in x])
    np.testing.assert_array_equal(
        bucketize(written, boundaries), bucketize(x.astype(np.float64), boundaries)
    )


def test_buckets() -> None:
    x = np.array([-math.inf, -1, 0, 0.5, 1, 2, math.nan])
    assert bucketize(x, (-1.0, 0.0, 1.0)).tolist() == [1, 1, 2, 3, 3, 4, 0]
    assert bucketize(x, ()).tolist() == [1, 1, 1, 1, 1, 1, 0]


def test_distinct_numbers_fill_buckets_alike(tmp_path: Path) -> None:
    values = np.random.default_rng(0).permutation(1000).astype(np.float64)
    boundaries = quantile_boundaries(ordered(tmp_path, [values], np.float64), 8)
    assert np.bincount(bucketize(values, boundaries)).tolist() == [0] + [125] * 8


def test_little_is_held_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantile, "RUN_VALUES", 1000)
    x = ordered(tmp_path, [np.arange(50_500, dtype=np.int64)[::-1].copy()], np.int64)
    assert (tmp_path / "values").stat().st_size == 50_000 * 8
    assert sum(len(chunk) for chunk in x._new) == 500
    assert x.at([0, 499, 500, 50_499]).tolist() == [0, 499, 500, 50_499]
    # nothing is written until a run is full
    small = ordered(tmp_path / "none", [np.arange(10)], np.int64)
    assert small.at([9]).tolist() == [9]


@settings(max_examples=100)
@given(st.lists(st.lists(st.integers(-3, 3), max_size=30), max_size=4), st.integers(-4, 4))
def test_how_many_lie_below(tmp_path_factory, chunks: list[list[int]], x: int) -> None:
    numbers = ordered(
        tmp_path_factory.mktemp("below"), [np.array(chunk, np.int64) for chunk in chunks], np.int64
    )
    flat = [value for chunk in chunks for value in chunk]
    assert numbers.below(x) == sum(value < x for value in flat)
    assert numbers.up_to(np.array([x, 0])).tolist() == [
        sum(value <= bound for value in flat) for bound in (x, 0)
    ]
