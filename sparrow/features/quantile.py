"""Exact order statistics of more numbers than memory should hold, and the buckets that they cut."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sparrow.core.arrays import Array, Float64s, Int64s

RUN_VALUES = 1 << 20
_SAMPLE_EVERY = 4096


class Ordered:
    """Takes in int64 or float64 numbers in any order, and tells which are at given places of their
    ascending order.

    Memory holds 8 bytes for each of RUN_VALUES numbers and for every 4096th of the rest. The rest
    is in the file `path`, as sorted runs; the caller deletes it. NaN must not come in. Regular
    sampling bounds what lies between two samples (Li et al., 1993).
    """

    def __init__(self, path: Path, kind: type[np.int64] | type[np.float64]) -> None:
        self._path = path
        self._kind = kind
        self._new: list[Array] = []
        self._held = 0
        self._lengths: list[int] = []  # of the runs in the file

    def __len__(self) -> int:
        return sum(self._lengths) + self._held

    def add(self, x_N: Array) -> None:
        """Takes in numbers [N]."""
        assert x_N.dtype == self._kind
        for i in range(0, len(x_N), RUN_VALUES):
            self._new.append(x_N[i : i + RUN_VALUES].copy())
            self._held += len(self._new[-1])
            if self._held >= RUN_VALUES:
                self._spill()

    def at(self, places: Sequence[int]) -> Array:
        """Returns the numbers at these places [P] of the ascending order. For each, 0 <= place <
        len(self).
        """
        places_P = np.asarray(places, np.int64)
        assert not len(places_P) or (places_P.min() >= 0 and places_P.max() < len(self))
        runs = self.runs()
        sample = np.unique(
            np.concatenate([run[::_SAMPLE_EVERY] for run in runs] or [np.empty(0, self._kind)])
        )
        below_S = sum(
            (run.searchsorted(sample, "left") for run in runs), np.zeros(len(sample), np.int64)
        )
        upto_S = sum(
            (run.searchsorted(sample, "right") for run in runs), np.zeros(len(sample), np.int64)
        )
        # The sample holds the least number of all: every place is either one of a sample's own or
        # right after them.
        at_P = below_S.searchsorted(places_P, "right") - 1
        x_P = sample[at_P]
        between_P = places_P >= upto_S[at_P]
        for s in np.unique(at_P[between_P]):
            end = sample[s + 1] if s + 1 < len(sample) else None
            pieces = [run[run.searchsorted(sample[s], "right") : _first(run, end)] for run in runs]
            in_gap_P = between_P & (at_P == s)
            x_P[in_gap_P] = np.sort(np.concatenate(pieces))[places_P[in_gap_P] - upto_S[s]]
        return x_P

    def below(self, x: float) -> int:
        """Returns how many numbers are less than x."""
        return sum(int(run.searchsorted(x, "left")) for run in self.runs())

    def up_to(self, x_P: Array) -> Int64s:
        """Returns how many numbers are each of x_P [P] or less."""
        return sum(
            (run.searchsorted(x_P, "right") for run in self.runs()), np.zeros(len(x_P), np.int64)
        )

    def _spill(self) -> None:
        with self._path.open("ab") as file:
            np.sort(np.concatenate(self._new)).tofile(file)
        self._lengths.append(self._held)
        self._new = []
        self._held = 0

    def runs(self) -> list[Array]:
        """Returns everything that was taken in, as sorted pieces."""
        runs = [np.sort(np.concatenate(self._new))] if self._new else []
        if self._lengths:
            spilled = np.memmap(self._path, self._kind, "r")
            runs += np.split(spilled, np.cumsum(self._lengths)[:-1])
        return runs


def _first(run: Array, end: Any) -> int:
    return len(run) if end is None else int(run.searchsorted(end, "left"))


def quantile_boundaries(x: Ordered, buckets: int) -> tuple[float, ...]:
    """Returns what parts numbers into `buckets` that hold equally many. They ascend, and are at
    most buckets - 1.

    Bucket k of K ends with the smallest number at or below which are at least k / K of the numbers
    (the inverse of the empirical distribution; Hyndman and Fan 1996, type 1). Equal ends are
    merged. A boundary lies halfway between the end of its bucket and the next greater number: so a
    number that is rounded on its way is in the bucket that it was in, unless the two lie closer
    together than it is rounded.
    """
    if not len(x):
        return ()
    places = [-(-k * len(x) // buckets) - 1 for k in range(1, buckets)]
    ends = np.unique(x.at([*places, len(x) - 1]))[:-1]  # the last bucket's is no boundary
    following = x.at(x.up_to(ends).tolist())
    halfway = ends + (following - ends) / 2
    # floats side by side have none between them
    return tuple(np.where(halfway < following, halfway, ends).tolist())


def bucketize(x_N: Float64s, boundaries: Sequence[float]) -> Int64s:
    """Returns buckets int64 [N]: 1 for x <= boundaries[0], up to len(boundaries) + 1; 0 for missing
    numbers (NaN).
    """
    buckets_N = np.searchsorted(np.asarray(boundaries, np.float64), x_N, "left") + 1
    return np.where(np.isnan(x_N), 0, buckets_N).astype(np.int64)
