from __future__ import annotations

import datetime
import math

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparrow.core import UserError
from sparrow.features import Moments, as_numbers, transform


@pytest.mark.parametrize(
    ("array", "want"),
    [
        (pa.array([1, None], pa.int8()), [1, math.nan]),
        (pa.array([True, False]), [1, 0]),
        (pa.array([" 2.5", None, " "]), [2.5, math.nan, math.nan]),
        (pa.array([1.5, math.nan, None]), [1.5, math.nan, math.nan]),
    ],
)
def test_numbers_of_any_type(array: pa.Array, want: list[float]) -> None:
    np.testing.assert_array_equal(as_numbers(array, "x", 0), want)


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (pa.array([1.0, -math.inf]), r"'x', row 8: -inf is infinite"),
        (pa.array([0.0, 1e39]), r"'x', row 8: 1e\+39 is infinite in float32"),
        (pa.array(["a"]), r"'x': string where a number is needed .*categorical"),
        (pa.array([[1]]), r"'x': list.* where a number is needed"),
        (pa.array([datetime.datetime(2020, 1, 1)]), r"'x': timestamp.* where a number is needed"),
    ],
)
def test_what_is_no_number_is_named(array: pa.Array, words: str) -> None:
    with pytest.raises(UserError, match=words):
        as_numbers(array, "x", 7)


def test_transforms_send_missing_to_zero() -> None:
    x = np.array([3.0, math.nan, -(math.e**2 - 1)])
    np.testing.assert_allclose(transform(x, "none", None, None), [3, 0, 1 - math.e**2], rtol=1e-6)
    np.testing.assert_allclose(transform(x, "standard", 1.0, 2.0), [1, 0, -(math.e**2) / 2], rtol=1e-6)
    np.testing.assert_allclose(transform(x, "log", 1.0, 2.0), [math.log(4) / 2 - 0.5, 0, -1.5], rtol=1e-6)


def test_values_far_beyond_the_training_part_stay_finite() -> None:
    assert np.isfinite(transform(np.array([3e38]), "standard", 0.0, 1e-6)).all()


@settings(max_examples=50)
@given(st.lists(st.lists(st.one_of(st.just(math.nan), st.floats(-1e6, 1e6)), max_size=8), max_size=6))
def test_moments_of_a_stream_are_those_of_the_whole(parts: list[list[float]]) -> None:
    moments = Moments()
    for part in parts:
        moments.add(np.array(part, np.float64))
    whole = np.array([x for part in parts for x in part if not math.isnan(x)])
    assert moments.count == len(whole)
    if len(whole):
        assert moments.mean == pytest.approx(whole.mean(), rel=1e-9, abs=1e-6)
        assert moments.squares == pytest.approx(((whole - whole.mean()) ** 2).sum(), rel=1e-6, abs=1e-3)


def test_a_constant_has_std_one() -> None:
    for parts in ([5], [3, 7, 11], []):
        moments = Moments()
        for size in parts:
            moments.add(np.full(size, 0.1))  # whose sums round differently
        assert moments.std == 1.0
