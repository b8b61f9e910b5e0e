from __future__ import annotations

import datetime
import math
from fractions import Fraction

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sparrow.core import UserError
from sparrow.features.numeric import Statistics, as_numbers, tamed, transform, untamed, without


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


def test_a_list_is_refused_where_some_texts_mean_missing() -> None:
    with pytest.raises(UserError, match="column 'x'"):
        as_numbers(without(pa.array([[1, 2], None]), ["none"]), "x", 0)


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (pa.array([1.0, -math.inf]), r"'x', row 8: -inf is infinite"),
        (pa.array([0.0, 1e39]), r"'x', row 8: 1e\+39 is infinite in float32"),
        (
            pa.array(["1", None, " a "]),
            r"'x', row 9: 'a' is no number; .*columns\.x\.missing.*categorical",
        ),
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
    np.testing.assert_allclose(
        transform(x, "standard", 1.0, 5.0), [0.4, 0, -(math.e**2) / 5], rtol=1e-6
    )
    np.testing.assert_allclose(
        transform(x, "log", 1.0, 2.0), [math.log(4) / 2 - 0.5, 0, -1.5], rtol=1e-6
    )


def test_tails_of_standard_numbers_grow_like_a_logarithm_and_keep_their_order() -> None:
    z = np.sort(np.concatenate([np.linspace(-9, 9, 1001), [-1e30, -2, 2, 1e30]]))
    found = tamed(z)
    inside = np.abs(z) <= 2
    np.testing.assert_array_equal(found[inside], z[inside])
    np.testing.assert_allclose(
        found[~inside], np.sign(z[~inside]) * (2 + np.log(np.abs(z[~inside]) - 1)), rtol=1e-12
    )
    assert (np.diff(found)[np.diff(z) > 0] > 0).all()
    np.testing.assert_allclose(untamed(found), z, rtol=1e-12)
    x = np.array([70.0, math.nan, -130.0])
    np.testing.assert_allclose(
        transform(x, "standard", 10.0, 10.0), [2 + math.log(5), 0, -2 - math.log(13)], rtol=1e-6
    )
    np.testing.assert_allclose(
        transform(x, "log", 0.0, 1.0), [math.log(71), 0, -math.log(131)], rtol=1e-6
    )


def test_values_far_beyond_the_training_part_stay_finite() -> None:
    assert np.isfinite(transform(np.array([3e38]), "standard", 0.0, 1e-6)).all()


@settings(max_examples=50)
@given(
    st.lists(
        st.one_of(
            st.just(math.nan), st.floats(-3e38, 3e38), st.floats(1e9, 1e9 + 1), st.floats(-1, 1)
        )
    )
)
@example([2.0251839478077948e-162])
def test_moments_are_exact_in_any_order_and_pieces(x: list[float]) -> None:
    x_N = np.array(x, np.float64)
    moments, pieces = Statistics(), Statistics()
    moments.add(x_N)
    for piece in np.array_split(np.random.default_rng(0).permutation(x_N), 3):
        one = Statistics()
        one.add(piece)
        pieces.merge(one)
    assert moments == pieces
    whole = [Fraction(each) * (abs(each) >= 2**-150) for each in x if not math.isnan(each)]
    assert moments.count == len(whole)
    if whole:
        mean = sum(whole) / len(whole)
        assert moments.mean == float(mean)
        variance = sum((each - mean) ** 2 for each in whole) / len(whole)
        assert moments.std == pytest.approx(math.sqrt(variance) if variance else 1.0, rel=1e-12)


def test_moments_of_many_numbers_are_near_numpys() -> None:
    x_N = np.random.default_rng(0).normal(1e6, 1.0, 100_000)  # more than one chunk
    moments = Statistics()
    moments.add(x_N)
    assert moments.mean == pytest.approx(x_N.mean(), rel=1e-15)
    assert moments.std == pytest.approx(x_N.std(), rel=1e-9)


def test_a_constant_has_std_one() -> None:
    for parts in ([5], [3, 7, 11], []):
        moments = Statistics()
        for size in parts:
            moments.add(np.full(size, 0.1))
        assert moments.std == 1.0
