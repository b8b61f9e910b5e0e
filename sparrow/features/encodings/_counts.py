"""Ids counted in bounded memory: when and how often each occurs, from which follows when it is
known.

An id is known in a row of training when rows of earlier moments hold it at least min_count - 1
times; where it is not, it is unknown. A table has rows for the ids that are known in some row of
training, as only these rows learn. So whether an id is known never depends on what came later, nor
on other rows of the same moment.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sparrow.core.arrays import Bools, Int64s

MISSING = 0
UNKNOWN = 1
FIRST = 2  # the row of a missing id, that of any unknown one, and that of the first known one
MIN_COUNT = 2  # by default
BEFORE = int(np.iinfo(np.int64).min)  # a moment before all of a log: of what earlier logs held
MERGED = 1 << 18  # entries that are merged at a time


@dataclass(frozen=True, eq=False)
class DistinctIds:
    """Some ids of a stream in the order of their hashes, hashes_U int64 [U], and what became of
    each.

    counts_U: int64 [U], occurrences. known_U: bool [U], whether it is known in some row. since_2U:
    int64 [2, U], for those that are: the moment (time, place) after which. today_U: bool [U], False
    for ids of earlier logs alone.
    """

    hashes_U: Int64s
    counts_U: Int64s
    known_U: Bools
    since_2U: Int64s
    today_U: Bools


class Counts:
    """When and how often each id of a stream occurs, by its hash.

    An entry, a column int64 [4], is an id's hash, a moment (time, place) and the occurrences at it.
    Kept of each id are its first entries, until they hold `needed` occurrences, and one for all
    later ones at the last moment of these. needed: min_count - 1. memory: entries held, of 32 bytes
    each, give or take; when there are more, sorted runs go to the file `path`, which the caller
    deletes.
    """

    def __init__(self, path: Path, needed: int = MIN_COUNT - 1, memory: int = MERGED) -> None:
        self._path = path
        self.needed = needed
        self._memory = memory
        self._new: list[Int64s] = []
        self._held = self._base = 0
        self._runs: list[int] = []

    def add(self, entries_4E: Int64s) -> None:
        """Takes in entries int64 [4, E], in any order."""
        self._new.append(entries_4E)
        self._held += entries_4E.shape[1]
        if self._held < self._memory + self._base:
            return
        self._new = [self._merged(self._new)]
        self._held = self._base = self._new[0].shape[1]
        if self._held > self._memory:
            with self._path.open("ab") as file:
                self._new[0].tofile(file)
            self._runs.append(self._held)
            self._new = []
            self._held = 0
            self._base = 0

    def remember(self, hashes_U: Int64s, counts_U: Int64s) -> None:
        """Takes in how often ids occurred in earlier logs."""
        before_U = np.full(len(hashes_U), BEFORE)
        self.add(np.stack([hashes_U, before_U, before_U, counts_U]))

    def merged(self) -> Iterator[Int64s]:
        """Yields all entries int64 [4, E] in the order of hash and moment, about MERGED at a time.
        No id is cut.
        """
        runs = [self._merged(self._new)] if self._new else []
        if self._runs:
            spilled = np.memmap(self._path, np.int64, "r")
            first = 0
            for size in self._runs:
                runs.append(spilled[4 * first : 4 * (first + size)].reshape(4, size))
                first += size
        parts = -(-sum(run.shape[1] for run in runs) // MERGED)
        ends = [((k + 1) << 63) // parts for k in range(parts)]  # hashes are spread evenly
        for low, high in zip([0, *ends], ends, strict=False):
            pieces = []
            for run in runs:
                i = np.searchsorted(run[0], low)
                j = run.shape[1]
                if high < 1 << 63:
                    j = int(np.searchsorted(run[0], high))
                pieces.append(run[:, i:j])
            yield self._merged(pieces)

    def distinct_ids(self) -> Iterator[DistinctIds]:
        """Yields every id once, about MERGED of them at a time."""
        for entries_4E in self.merged():
            hash_E, _, _, count_E = entries_4E
            first_U = np.flatnonzero(_changes(hash_E))
            last_U = np.append(first_U[1:], len(hash_E))[: len(first_U)] - 1
            total_U = np.add.reduceat(count_E, first_U) if len(first_U) else count_E
            known_U = total_U - count_E[last_U] >= self.needed
            since_2U = np.where(last_U > first_U, entries_4E[1:3, last_U - 1], BEFORE)
            today_U = entries_4E[1, last_U] > BEFORE
            yield DistinctIds(hash_E[first_U], total_U, known_U, since_2U, today_U)

    def _merged(self, parts: list[Int64s]) -> Int64s:
        """Entries in order, those of one moment, and those after the first `needed` occurrences, as
        one.
        """
        entries_4M = np.concatenate(parts, axis=1)
        entries_4M = entries_4M[:, np.lexsort(entries_4M[2::-1])]
        hash_M, time_M, place_M, count_M = entries_4M
        ids_M = _changes(hash_M)
        moments_M = ids_M | _changes(time_M) | _changes(place_M)
        before_M = np.cumsum(count_M) - count_M
        at_M = np.arange(len(hash_M))
        before_M = (
            before_M[np.maximum.accumulate(at_M * moments_M)]
            - before_M[np.maximum.accumulate(at_M * ids_M)]
        )
        late_M = before_M >= self.needed
        first_E = np.flatnonzero(
            ids_M | (moments_M & ~late_M) | (late_M & ~np.append(False, late_M)[:-1])
        )
        if len(first_E) == len(hash_M):
            return entries_4M
        last_E = np.append(first_E[1:], len(hash_M)) - 1
        merged = entries_4M[:, last_E]
        merged[3] = np.add.reduceat(count_M, first_E)
        return merged


def _changes(x_N: Int64s) -> Bools:
    """Where another value begins, bool [N]."""
    return np.append(True, x_N[1:] != x_N[:-1])[: len(x_N)]
