"""What whole numbers are: names of things, or measures and counts."""

from __future__ import annotations

import numpy as np

from sparrow.core.arrays import Float64s, Int64s

_SEED = 471_826_055  # one that nobody else draws with
_PRIOR = 20
_UNEVEN = 0.03


def tells_apart(x_N: Int64s, y_N: Float64s) -> bool:
    """Returns whether integers are names: each value tells more of the label than a range of values
    does.

    Three predictions are compared on rows that they have not seen, half by half: the mean label of
    the rows with the same value, that of the rows in the same of 32 ranges of equally many rows,
    and the mean label of all rows, to which the others are drawn as if by `_PRIOR` rows. The first
    must err less than both others, by three standard errors.

    Args:
        x_N: the integers.
        y_N: the label, 0 or 1.
    """
    _, value_N, counts = np.unique(x_N, return_inverse=True, return_counts=True)
    range_N = ((np.cumsum(counts) - 1) * 32 // max(len(x_N), 1))[value_N]
    # labels of a log may alternate
    is_second_N = np.random.default_rng(_SEED).random(len(x_N)) < 0.5
    mean = y_N.mean()
    value_err_N = np.empty(len(x_N))
    range_err_N = np.empty(len(x_N))
    for bin_N, error_N in ((value_N, value_err_N), (range_N, range_err_N)):
        for fit_N in (is_second_N, ~is_second_N):
            rows = np.bincount(bin_N[fit_N], minlength=len(counts) + 32)
            positives = np.bincount(bin_N[fit_N], y_N[fit_N], len(counts) + 32)
            guess = (positives + _PRIOR * mean) / (rows + _PRIOR)
            error_N[~fit_N] = ((y_N - guess[bin_N]) ** 2)[~fit_N]
    gains = range_err_N - value_err_N, (y_N - mean) ** 2 - value_err_N
    return all(bool(gain_N.mean() > 3 * gain_N.std() / len(gain_N) ** 0.5 > 0) for gain_N in gains)


def is_uneven(x_N: Int64s) -> bool:
    """Returns whether integers are names: some come far more often than their neighbours.

    What is measured or counted comes about as often as its neighbours, but for round numbers and
    those just below them, which people and shops prefer. So the values that end in 1, 3 and 6 are
    compared with those that end in 2, 4 and 7. If a pair comes s times and its first one is as
    likely as in all pairs, the difference d of the two is m s on average, with a variance of
    s (1 - m^2). Of names most neighbours do not exist, and some are popular. Four standard errors
    count, and unevenness of 0.03 (the variance of half the relative difference).

    Args:
        x_N: the integers.
    """
    values, counts = np.unique(x_N, return_counts=True)
    is_first = np.isin(values % 10, (1, 3, 6))
    is_second = np.isin(values % 10, (2, 4, 7))
    paired = is_first | is_second
    _, place = np.unique((values - is_second)[paired], return_inverse=True)
    pairs = np.bincount(place, counts[paired])
    apart = np.bincount(place, (counts * np.where(is_second, -1, 1))[paired])
    slope = apart.sum() / max(pairs.sum(), 1)
    excess = ((apart - slope * pairs) ** 2 - pairs * (1 - slope**2)).sum()
    return bool(
        excess > 4 * np.sqrt((2 * pairs * (pairs - 1)).sum())
        and excess > _UNEVEN * (pairs**2).sum()
    )


def is_count(x_N: Int64s) -> bool:
    """Returns whether integers count something, by how often they come.

    Counts are 0 or 1 and the next ones. Each of four or more is rarer than the one before, or seven
    or more rise to one peak and fall from there. Large ones are few: of 1 row in 20 they may come
    in any order, of 1 in 100 with gaps.

    Args:
        x_N: the integers.
    """
    values, counts = np.unique(x_N, return_counts=True)
    most, many = 1 + np.searchsorted(np.cumsum(counts), np.array([0.99, 0.95]) * len(x_N))
    if values[0] not in (0, 1) or (np.diff(values[:most]) != 1).any():
        return False
    peak = int(counts[:many].argmax())
    rises = np.diff(counts[: peak + 1]) > 0
    falls = np.diff(counts[peak:many]) < 0
    return bool(rises.all() and falls.all() and (most >= 4 if peak == 0 else many >= 7))
