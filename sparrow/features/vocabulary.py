"""Vocabularies: ids counted in bounded memory, numbered by how frequent they are, and looked up."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from sparrow.core.errors import UserError

Int64s = npt.NDArray[np.int64]

MISSING, UNKNOWN, FIRST = 0, 1, 2  # the row of a missing id, that of any unknown one, and that of the most frequent
MERGED = 1 << 18  # ids whose counts are merged at a time


class Counts:
    """How often each id of a stream occurs, by its hash.

    memory: ids held, of 16 bytes each, give or take; when there are more, sorted runs go to the file `path`, which the
    caller deletes.
    """

    def __init__(self, path: Path, memory: int = MERGED) -> None:
        self._path, self._memory = path, memory
        self._new: list[tuple[Int64s, Int64s]] = []
        self._held = self._base = 0
        self._runs: list[int] = []

    def add(self, hashes_U: Int64s, counts_U: Int64s) -> None:
        """Take in ids int64 [U], as `hash_ids` gives them, and how often each was seen."""
        self._new.append((hashes_U, counts_U))
        self._held += len(hashes_U)
        if self._held < self._memory + self._base:
            return
        merged = _merged(self._new)
        self._new, self._held = [merged], len(merged[0])
        self._base = self._held
        if self._held > self._memory:
            with self._path.open("ab") as file:
                np.concatenate(merged).tofile(file)
            self._runs.append(self._held)
            self._new, self._held, self._base = [], 0, 0

    def merged(self) -> Iterator[tuple[Int64s, Int64s]]:
        """Every id once, int64 [U], and its count, in the order of the hashes, about MERGED of them at a time."""
        runs = [_merged(self._new)] if self._new else []
        if self._runs:
            spilled, first = np.memmap(self._path, np.int64, "r"), 0
            for size in self._runs:
                runs.append((spilled[first : first + size], spilled[first + size : first + 2 * size]))
                first += 2 * size
        parts = -(-sum(len(hashes) for hashes, _ in runs) // MERGED)
        ends = [((k + 1) << 63) // parts for k in range(parts)]  # hashes are spread evenly
        for low, high in zip([0, *ends], ends, strict=False):
            pieces = []
            for hashes, counts in runs:
                i, j = np.searchsorted(hashes, low), len(hashes)
                if high < 1 << 63:
                    j = int(np.searchsorted(hashes, high))
                pieces.append((hashes[i:j], counts[i:j]))
            yield _merged(pieces)


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The ids of a table by their hash, in the order of their rows: number i has row i + 2.

    hashes_V: int64 [V]. counts_V: int64 [V], how often each was seen in training.
    """

    hashes_V: Int64s
    counts_V: Int64s

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

    def grown(self, counts: Counts, min_count: int) -> tuple[Vocabulary, int]:
        """With the ids that occur at least `min_count` times appended, and how many distinct ones there were.

        The rows that are, stay; the new ones come by falling count and, where that is equal, by hash.
        """
        hashes_V, counts_V = self.hashes_V, self.counts_V.copy()
        new: list[tuple[Int64s, Int64s]] = []
        distinct = 0
        for hashes_U, counts_U in counts.merged():
            distinct += len(hashes_U)
            rows_U = self.rows_of(hashes_U)
            known_U = rows_U >= FIRST
            counts_V[rows_U[known_U] - FIRST] += counts_U[known_U]
            kept_U = ~known_U & (counts_U >= min_count)
            new.append((hashes_U[kept_U], counts_U[kept_U]))
        if new:
            hashes_K, counts_K = (np.concatenate(parts) for parts in zip(*new, strict=True))
            order = np.argsort(-counts_K, kind="stable")  # they are in the order of their hashes
            hashes_V, counts_V = np.append(hashes_V, hashes_K[order]), np.append(counts_V, counts_K[order])
        return Vocabulary(hashes_V, counts_V), distinct

    def save(self, path: Path) -> None:
        """Write as Parquet: hash and count, in the order of the rows."""
        table = pa.table({"hash": self.hashes_V, "count": self.counts_V})
        pq.write_table(table, path, compression="lz4", use_dictionary=False, write_page_checksum=True)

    @classmethod
    def load(cls, path: Path) -> Vocabulary:
        """Read what `save` wrote; UserError when it is missing or damaged."""
        try:
            table = pq.read_table(path, columns=["hash", "count"], page_checksum_verification=True)
            hashes_V, counts_V = table["hash"].to_numpy().astype(np.int64), table["count"].to_numpy().astype(np.int64)
        except (pa.ArrowException, OSError, ValueError, KeyError) as error:
            words = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise UserError(f"{path}: missing or damaged ({words}); prepare the log again") from None
        return cls(hashes_V, counts_V)


EMPTY = Vocabulary(np.empty(0, np.int64), np.empty(0, np.int64))


def _merged(parts: list[tuple[Int64s, Int64s]]) -> tuple[Int64s, Int64s]:
    """Ids in order, each once, and the sums of their counts."""
    hashes_M, counts_M = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    order = np.argsort(hashes_M, kind="stable")
    hashes_M, counts_M = hashes_M[order], counts_M[order]
    first = np.flatnonzero(np.append(True, hashes_M[1:] != hashes_M[:-1])[: len(hashes_M)])
    if len(first) == len(hashes_M):
        return hashes_M, counts_M
    return hashes_M[first], np.add.reduceat(counts_M, first)
