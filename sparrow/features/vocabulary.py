"""Vocabularies: ids counted in bounded memory, numbered by how frequent they are, and looked up.

An id is known in a row of training when rows of earlier moments hold it at least min_count - 1 times; where it is not,
it is unknown. A table has rows for the ids that are known in some row of training, as only these rows learn. So
whether an id is known never depends on what came later, nor on other rows of the same moment.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from sparrow.core.errors import UserError
from sparrow.features.hashing import hash_ids

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

MISSING, UNKNOWN, FIRST = 0, 1, 2  # the row of a missing id, that of any unknown one, and that of the first known one
MIN_COUNT = 2  # unless told
BEFORE = int(np.iinfo(np.int64).min)  # a moment before all of a log: of what earlier logs held
MERGED = 1 << 18  # entries that are merged at a time
GROUP = 1 << 24  # rows of a row group in a file


@dataclass(frozen=True, eq=False)
class Seen:
    """Some ids of a stream in the order of their hashes, hashes_U int64 [U], and what became of each.

    counts_U: int64 [U], occurrences. known_U: bool [U], whether it is known in some row. since_2U: int64 [2, U], for
    those that are: the moment (time, place) after which. today_U: bool [U], False for ids of earlier logs alone.
    """

    hashes_U: Int64s
    counts_U: Int64s
    known_U: Bools
    since_2U: Int64s
    today_U: Bools


class Counts:
    """When and how often each id of a stream occurs, by its hash.

    An entry, a column int64 [4], is an id's hash, a moment (time, place) and the occurrences at it. Kept of each id are
    its first entries, until they hold `needed` occurrences, and one for all later ones at the last moment of these.
    needed: min_count - 1. memory: entries held, of 32 bytes each, give or take; when there are more, sorted runs go to
    the file `path`, which the caller deletes.
    """

    def __init__(self, path: Path, needed: int = MIN_COUNT - 1, memory: int = MERGED) -> None:
        self._path, self.needed, self._memory = path, needed, memory
        self._new: list[Int64s] = []
        self._held = self._base = 0
        self._runs: list[int] = []

    def add(self, entries_4E: Int64s) -> None:
        """Take in entries int64 [4, E], in any order."""
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
            self._new, self._held, self._base = [], 0, 0

    def remember(self, hashes_U: Int64s, counts_U: Int64s) -> None:
        """Take in how often ids occurred in earlier logs."""
        before_U = np.full(len(hashes_U), BEFORE)
        self.add(np.stack([hashes_U, before_U, before_U, counts_U]))

    def merged(self) -> Iterator[Int64s]:
        """All entries int64 [4, E], in the order of hash and moment, about MERGED of them at a time, ids whole."""
        runs = [self._merged(self._new)] if self._new else []
        if self._runs:
            spilled, first = np.memmap(self._path, np.int64, "r"), 0
            for size in self._runs:
                runs.append(spilled[4 * first : 4 * (first + size)].reshape(4, size))
                first += size
        parts = -(-sum(run.shape[1] for run in runs) // MERGED)
        ends = [((k + 1) << 63) // parts for k in range(parts)]  # hashes are spread evenly
        for low, high in zip([0, *ends], ends, strict=False):
            pieces = []
            for run in runs:
                i, j = np.searchsorted(run[0], low), run.shape[1]
                if high < 1 << 63:
                    j = int(np.searchsorted(run[0], high))
                pieces.append(run[:, i:j])
            yield self._merged(pieces)

    def seen(self) -> Iterator[Seen]:
        """Every id once, about MERGED of them at a time."""
        for entries_4E in self.merged():
            hash_E, _, _, count_E = entries_4E
            first_U = np.flatnonzero(_changes(hash_E))
            last_U = np.append(first_U[1:], len(hash_E))[: len(first_U)] - 1
            total_U = np.add.reduceat(count_E, first_U) if len(first_U) else count_E
            known_U = total_U - count_E[last_U] >= self.needed
            since_2U = np.where(last_U > first_U, entries_4E[1:3, last_U - 1], BEFORE)
            yield Seen(hash_E[first_U], total_U, known_U, since_2U, entries_4E[1, last_U] > BEFORE)

    def _merged(self, parts: list[Int64s]) -> Int64s:
        """Entries in order, those of one moment, and those after the first `needed` occurrences, as one."""
        entries_4M = np.concatenate(parts, axis=1)
        entries_4M = entries_4M[:, np.lexsort(entries_4M[2::-1])]
        hash_M, time_M, place_M, count_M = entries_4M
        ids_M = _changes(hash_M)
        moments_M = ids_M | _changes(time_M) | _changes(place_M)
        before_M = np.cumsum(count_M) - count_M
        at_M = np.arange(len(hash_M))
        before_M = before_M[np.maximum.accumulate(at_M * moments_M)] - before_M[np.maximum.accumulate(at_M * ids_M)]
        late_M = before_M >= self.needed
        first_E = np.flatnonzero(ids_M | (moments_M & ~late_M) | (late_M & ~np.append(False, late_M)[:-1]))
        if len(first_E) == len(hash_M):
            return entries_4M
        last_E = np.append(first_E[1:], len(hash_M)) - 1
        merged = entries_4M[:, last_E]
        merged[3] = np.add.reduceat(count_M, first_E)
        return merged


def _nothing() -> Iterator[tuple[Int64s, Int64s]]:
    yield from ()


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The ids of a table by their hash, in the order of their rows: number i has row i + FIRST.

    hashes_V: int64 [V]. counts_V: int64 [V], how often each was seen in training. rare: gives the ids that are not yet
    known and how often they were seen (min_count - 1 times at most), int64 each, some at a time; no memory holds them.
    """

    hashes_V: Int64s
    counts_V: Int64s
    rare: Callable[[], Iterator[tuple[Int64s, Int64s]]] = _nothing

    @property
    def rows(self) -> int:
        """Rows that a table of these ids has: one for each, and those of missing and unknown ids."""
        return len(self.hashes_V) + FIRST

    @cached_property
    def _sorted(self) -> tuple[Int64s, Int64s]:
        order = np.argsort(self.hashes_V)
        return self.hashes_V[order], order + FIRST

    def rows_of(self, hashes_U: Int64s) -> Int64s:
        """The row int64 [U] of each hash: 0 for missing ids, whose hash is 0, and 1 for ids that are not there."""
        hashes, rows = self._sorted
        if not len(hashes):
            return np.where(hashes_U == 0, MISSING, UNKNOWN)
        at = np.minimum(np.searchsorted(hashes, hashes_U), len(hashes) - 1)
        return np.where(hashes[at] == hashes_U, rows[at], np.where(hashes_U == 0, MISSING, UNKNOWN))

    @property
    def digest(self) -> str:
        """What tells this vocabulary from others: 16 hex digits of the SHA-256 of its hashes in order."""
        return hashlib.sha256(self.hashes_V.astype("<i8").tobytes()).hexdigest()[:16]

    def grown(self, counts: Counts) -> tuple[Vocabulary, Int64s, int]:
        """With the ids that became known appended; since when, int64 [2, rows]; and how many distinct ids there were.

        The rows that are, stay; the new ones come by falling count and, where that is equal, by hash. Ids that were
        known are so from the start. counts: of what this vocabulary's `rare` gives, too.
        """
        counts_V = self.counts_V.copy()
        new: list[tuple[Int64s, Int64s, Int64s]] = []
        distinct = 0
        for seen in counts.seen():
            distinct += int(seen.today_U.sum())
            rows_U = self.rows_of(seen.hashes_U)
            old_U = rows_U >= FIRST
            counts_V[rows_U[old_U] - FIRST] += seen.counts_U[old_U]
            kept_U = ~old_U & seen.known_U
            new.append((seen.hashes_U[kept_U], seen.counts_U[kept_U], seen.since_2U[:, kept_U]))
        hashes_V, since_2R = self.hashes_V, np.full((2, self.rows), BEFORE)
        if new:
            hashes_K, counts_K, since_2K = (np.concatenate(parts, axis=-1) for parts in zip(*new, strict=True))
            order = np.argsort(-counts_K, kind="stable")  # they are in the order of their hashes
            hashes_V, counts_V = np.append(hashes_V, hashes_K[order]), np.append(counts_V, counts_K[order])
            since_2R = np.concatenate([since_2R, since_2K[:, order]], axis=1)
        made = Vocabulary(hashes_V, counts_V)

        def rare() -> Iterator[tuple[Int64s, Int64s]]:
            for seen in counts.seen():
                rare_U = made.rows_of(seen.hashes_U) == UNKNOWN
                yield seen.hashes_U[rare_U], np.minimum(seen.counts_U[rare_U], counts.needed)

        return Vocabulary(hashes_V, counts_V, rare), since_2R, distinct

    def save(self, path: Path) -> None:
        """Write as Parquet, hash and count: in the order of the rows, and in row groups behind these what is rare."""
        known = np.stack([self.hashes_V, self.counts_V])
        _write(path, ("hash", "count"), itertools.chain([known], map(np.stack, self.rare())), len(self.hashes_V))

    @classmethod
    def load(cls, path: Path) -> Vocabulary:
        """Read what `save` wrote, rare ids when they are asked for; UserError when it is missing or damaged."""
        known, groups = _groups(path)
        hashes_V, counts_V = _read(path, groups[:known], 2)

        def rare() -> Iterator[tuple[Int64s, Int64s]]:
            for group in groups[known:]:
                hashes_U, counts_U = _read(path, [group], 2)
                yield hashes_U, counts_U

        return cls(hashes_V, counts_V, rare)


@dataclass(frozen=True, eq=False)
class Range:
    """The integers of a table, of which number low + i has row i + FIRST, when it is known.

    counts_I: int32 [I], KNOWN, or how often each was seen, min_count - 1 times at most.
    """

    low: int
    counts_I: npt.NDArray[np.int32]

    KNOWN = -1

    def rows_of(self, integers_U: Int64s) -> Int64s:
        """The row int64 [U] of each integer; 1 for those outside, and for those that are not known."""
        inside_U = (integers_U >= self.low) & (integers_U <= self.low + len(self.counts_I) - 1)
        place_U = np.where(inside_U, integers_U, self.low) - self.low
        return np.where(inside_U & (self.counts_I[place_U] == self.KNOWN), place_U + FIRST, UNKNOWN)

    def rare(self) -> Iterator[tuple[Int64s, Int64s]]:
        """The integers that are not yet known, by their hashes, and how often each was seen, int64 each."""
        place_U = np.flatnonzero(self.counts_I > 0)
        yield hash_ids(pa.array(self.low + place_U)), self.counts_I[place_U].astype(np.int64)

    def grown(self, counts: Counts, low: int, high: int) -> tuple[Range, Int64s]:
        """That of low..high, with what `counts` saw of these; and since when they are known, int64 [2, rows].

        Integers that were known are so from the start. counts: of what this one's `rare` gives, too.
        """
        counts_I, since_2R = np.zeros(high - low + 1, np.int32), np.full((2, high - low + 1 + FIRST), BEFORE)
        known_I = np.zeros(len(counts_I), np.bool_)
        first, last = max(low, self.low), min(high + 1, self.low + len(self.counts_I))
        if first < last:
            known_I[first - low : last - low] = self.counts_I[first - self.low : last - self.low] == self.KNOWN
        hashes_I = hash_ids(pa.array(np.arange(low, high + 1)))
        order = np.argsort(hashes_I)
        hashes_I = hashes_I[order]
        for seen in counts.seen():
            at_U = np.minimum(np.searchsorted(hashes_I, seen.hashes_U), len(order) - 1)
            here_U = hashes_I[at_U] == seen.hashes_U
            place = order[at_U[here_U]]
            counts_I[place] = np.minimum(seen.counts_U[here_U], counts.needed)
            new = seen.known_U[here_U] & ~known_I[place]
            since_2R[:, place[new] + FIRST] = seen.since_2U[:, here_U][:, new]
            counts_I[place[new]] = self.KNOWN
        counts_I[known_I] = self.KNOWN
        return Range(low, counts_I), since_2R

    def save(self, path: Path) -> None:
        """Write as Parquet: the counts."""
        _write(path, ("count",), [self.counts_I[None]], len(self.counts_I))

    @classmethod
    def load(cls, path: Path, low: int) -> Range:
        """Read what `save` wrote; UserError when it is missing or damaged."""
        return cls(low, _read(path, _groups(path)[1], 1)[0].astype(np.int32))


def _write(path: Path, names: tuple[str, ...], pieces: Iterable[npt.NDArray[Any]], known: int) -> None:
    """Pieces [columns, N] as Parquet in row groups of GROUP rows, and how many of them the `known` first rows take."""
    columns = pa.schema([(name, pa.int64()) for name in names], {"known": str(-(-known // GROUP))})
    # Of a range's counts nearly all are alike: a dictionary makes next to nothing of them.
    dictionary = len(names) == 1
    with pq.ParquetWriter(
        path, columns, compression="lz4", use_dictionary=dictionary, write_page_checksum=True
    ) as file:
        for piece in pieces:
            if piece.shape[1]:
                file.write_table(pa.Table.from_arrays([pa.array(x, pa.int64()) for x in piece], schema=columns), GROUP)


def _groups(path: Path) -> tuple[int, list[int]]:
    """How many of a file's row groups are of known ids, and all of them; UserError when it is missing or damaged."""
    with _told(path), pq.ParquetFile(path) as file:
        return int(file.schema_arrow.metadata[b"known"]), list(range(file.num_row_groups))


def _read(path: Path, groups: list[int], columns: int) -> list[Int64s]:
    """The columns of some row groups."""
    if not groups:
        return [np.empty(0, np.int64)] * columns
    with _told(path), pq.ParquetFile(path, page_checksum_verification=True) as file:
        return [column.to_numpy() for column in file.read_row_groups(groups).columns]


@contextmanager
def _told(path: Path) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        words = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"{path}: missing or damaged ({words}); prepare the log again") from None


def _changes(x_N: Int64s) -> Bools:
    """Where another value begins, bool [N]."""
    return np.append(True, x_N[1:] != x_N[:-1])[: len(x_N)]


EMPTY = Vocabulary(np.empty(0, np.int64), np.empty(0, np.int64))
