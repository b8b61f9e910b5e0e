"""How often an id occurred before, and how often with a label of 1: counters, and target encoding
without leaks.

Source: ordered target statistics (Prokhorenkova et al., CatBoost, NeurIPS 2018, section 3.2).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa

from sparrow.core.arrays import Float64s, Int64s
from sparrow.features.encodings import FIRST, _files
from sparrow.features.hashing import row_hashes
from sparrow.features.schema import Column

PRIOR = 20.0  # rows that the mean of all rows counts for in the rate of an id


@dataclass(frozen=True, eq=False)
class Counted:
    """The ids of a column by their hash, ascending, and how often each occurred in training.

    hashes_V: int64 [V]. counts_2V: int64 [2, V], all its rows and those with a label of 1.
    """

    hashes_V: Int64s
    counts_2V: Int64s

    @classmethod
    def sum_by_hash(cls, hashes_N: Int64s, counts_2N: Int64s) -> Counted:
        """Returns what these sum up to, by hash."""
        hashes_V, at_N = np.unique(hashes_N, return_inverse=True)
        # exact below 2^53
        sums = [np.bincount(at_N, count_N, len(hashes_V)).astype(np.int64) for count_N in counts_2N]
        return cls(hashes_V, np.stack(sums))

    def at(self, hashes_N: Int64s) -> Int64s:
        """Returns the counts of each hash, int64 [2, N]; 0 where it is new."""
        if not len(self.hashes_V):
            return np.zeros((2, len(hashes_N)), np.int64)
        place_N = np.minimum(np.searchsorted(self.hashes_V, hashes_N), len(self.hashes_V) - 1)
        return np.where(self.hashes_V[place_N] == hashes_N, self.counts_2V[:, place_N], 0)

    @cached_property
    def totals_2(self) -> Int64s:
        """The counts of all ids together, int64 [2]."""
        totals_2: Int64s = self.counts_2V.sum(axis=1)
        return totals_2

    @property
    def digest(self) -> str:
        """What tells these counts from others: 16 hex digits of their SHA-256."""
        return hashlib.sha256(
            np.vstack([self.hashes_V, self.counts_2V]).astype("<i8").tobytes()
        ).hexdigest()[:16]

    def save(self, path: Path) -> None:
        """Writes hash, seen and positives as Parquet."""
        columns = np.vstack([self.hashes_V, self.counts_2V])
        _files.write(path, ("hash", "seen", "positives"), [columns], len(self.hashes_V))

    @classmethod
    def load(cls, path: Path) -> Counted:
        """Returns what `save` wrote.

        Raises:
            UserError: when the file is missing or damaged.
        """
        hashes_V, *counts = _files.read(path, _files.row_groups(path)[1], 3)
        return cls(hashes_V, np.stack(counts))


NOTHING = Counted(np.empty(0, np.int64), np.empty((2, 0), np.int64))


def numbers(column: Column, hashes_N: Int64s, counts_2N: Int64s, totals_2N: Int64s) -> Float64s:
    """Returns the raw numbers of a column of counts, float64 [N]; NaN where the id is missing.

    Of "rate" they are (positives + prior * m) / (seen + prior), where m = (positives of all + 1/2)
    / (rows of all + 1).

    Args:
        column: says which numbers.
        hashes_N: the ids.
        counts_2N: rows of each one's id, and those with a label of 1.
        totals_2N: the same of all ids, [2, N] or [2, 1].
    """
    occurrences_N, positives_N = counts_2N
    counts_N = positives_N if column.counts == "positives" else occurrences_N
    numbers_N = counts_N.astype(np.float64)
    if column.counts == "rate":
        total_N, total_positives_N = totals_2N
        prior = PRIOR if column.prior is None else column.prior
        prior_positives_N = prior * (total_positives_N + 0.5) / (total_N + 1)
        numbers_N = (positives_N + prior_positives_N) / (occurrences_N + prior)
    return np.where(hashes_N == 0, np.nan, numbers_N)


def frozen(column: Column, counted: Counted, coded: pa.DictionaryArray) -> Float64s:
    """Returns the raw numbers of coded ids after all rows that were counted, float64 [N]."""
    hashes_N = row_hashes(coded)
    return numbers(column, hashes_N, counted.at(hashes_N), counted.totals_2[:, None])


def by_row(column: Column, counted: Counted) -> Float64s:
    """Returns what `frozen` makes of a missing id, of a new one, and of each that was counted,
    float64 [V + 2].
    """
    hashes_R = np.concatenate([[0, 1], counted.hashes_V])
    counts_2R = np.pad(counted.counts_2V, ((0, 0), (FIRST, 0)))
    return numbers(column, hashes_R, counts_2R, counted.totals_2[:, None])
