"""Rows that stand for many showings: how many, and the shares of them that labels count."""

from __future__ import annotations

import numpy as np

from sparrow.core.arrays import Float64s
from sparrow.core.errors import UserError
from sparrow.features.labels import check_known, refuse_first


def shares(
    count_N: Float64s, name: str, impressions_N: Float64s, *, training: bool, row0: int
) -> Float64s:
    """Returns the share of each row's showings that a label counts, float64 [N]; NaN where the
    count is missing.

    Without a showing it is 0.

    Args:
        count_N: the counts, such as clicks; NaN where one is missing.
        name: the label, for errors.
        impressions_N: how many showings each row stands for.
        training: whether every count must be known.
        row0: the log's row of the first entry, for errors.

    Raises:
        UserError: for a count that is negative, no whole number or more than the showings, and when
            training for a missing one.
    """
    check_known(count_N, name, training, row0)
    bad_N = (count_N < 0) | (count_N != np.floor(count_N)) & ~np.isnan(count_N)
    remedy = (
        "beside impressions a label is a whole number, 0 or more; set probability = true if it is a"
        " rate"
    )
    refuse_first(bad_N, count_N, f"label {name!r}", row0, remedy)
    many = np.flatnonzero(count_N > impressions_N)
    if len(many):
        first = int(many[0])
        counted = f"{count_N[first]:g} of {impressions_N[first]:g} impressions"
        remedy = "a showing counts once at most; mend the row, or make another column the label"
        raise UserError(f"label {name!r}, row {row0 + first}: {counted}; {remedy}")
    return count_N / np.maximum(impressions_N, 1)


def checked_impressions(n_N: Float64s, name: str, row0: int) -> Float64s:
    """Returns impressions: they are whole numbers, 0 or more. UserError for another, with its
    row.
    """
    is_count_N = (n_N >= 0) & (n_N == np.floor(n_N)) & np.isfinite(n_N)
    remedy = (
        "impressions are whole numbers, 0 or more and never missing; weights that are not have kind"
        " 'weight'"
    )
    refuse_first(~is_count_N, n_N, f"impressions {name!r}", row0, remedy)
    return n_N
