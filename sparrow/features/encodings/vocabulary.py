"""Known ids become 2, 3, ... in the order of how frequent they are, whatever they are."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from sparrow.core.arrays import Int64s
from sparrow.features.encodings._counts import BEFORE, FIRST, MISSING, UNKNOWN, Counts
from sparrow.features.encodings._files import read, row_groups, write
from sparrow.features.encodings._ids import SeenIds
from sparrow.features.hashing import hashes_of
from sparrow.features.schema import Encoding

if TYPE_CHECKING:
    from sparrow.kernels.encode import Lookup

MOST = 5_000_000  # rows; a larger one is made only for tables that ask for it


def _nothing() -> Iterator[tuple[Int64s, Int64s]]:
    yield from ()


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The ids of a table by their hash, in the order of their rows: number i has row i + FIRST.

    hashes_V: int64 [V]. counts_V: int64 [V], how often each was seen in training. rare: gives the
    ids that are not yet known and how often they were seen (min_count - 1 times at most), int64
    each, some at a time; no memory holds them.
    """

    hashes_V: Int64s
    counts_V: Int64s
    rare: Callable[[], Iterator[tuple[Int64s, Int64s]]] = _nothing

    @property
    def rows(self) -> int:
        """How many table rows these ids need: one for each, and those of missing and unknown
        ids.
        """
        return len(self.hashes_V) + FIRST

    @cached_property
    def by_hash(self) -> tuple[Int64s, Int64s]:
        """The hashes in ascending order, and the row of each, int64 [V] each."""
        order = np.argsort(self.hashes_V)
        return self.hashes_V[order], order + FIRST

    def rows_of(self, hashes_U: Int64s) -> Int64s:
        """Returns the table row of each hash, int64 [U]; 0 for missing ids, whose hash is 0, and 1
        for unknown ids.
        """
        hashes, rows = self.by_hash
        if not len(hashes):
            return np.where(hashes_U == 0, MISSING, UNKNOWN)
        at = np.minimum(np.searchsorted(hashes, hashes_U), len(hashes) - 1)
        return np.where(hashes[at] == hashes_U, rows[at], np.where(hashes_U == 0, MISSING, UNKNOWN))

    @property
    def digest(self) -> str:
        """Returns what tells this vocabulary from others: 16 hex digits of the SHA-256 of its
        hashes in order.
        """
        return hashlib.sha256(self.hashes_V.astype("<i8").tobytes()).hexdigest()[:16]

    def grown(self, counts: Counts) -> tuple[Vocabulary, Int64s, int]:
        """Returns the vocabulary with the ids appended that became known.

        The table rows that are there stay. The new ones come by falling count and, where counts are
        equal, by hash. Ids that were known before are so from the start.

        Args:
            counts: has taken in what this vocabulary's `rare` gives, too.

        Returns:
            The vocabulary, since when its ids are known (int64 [2, rows]), and how many distinct
            ids there were.
        """
        counts_V = self.counts_V.copy()
        new: list[tuple[Int64s, Int64s, Int64s]] = []
        distinct = 0
        for batch in counts.distinct_ids():
            distinct += int(batch.today_U.sum())
            rows_U = self.rows_of(batch.hashes_U)
            old_U = rows_U >= FIRST
            counts_V[rows_U[old_U] - FIRST] += batch.counts_U[old_U]
            new_U = ~old_U & batch.known_U
            new.append((batch.hashes_U[new_U], batch.counts_U[new_U], batch.since_2U[:, new_U]))
        hashes_V = self.hashes_V
        since_2R = np.full((2, self.rows), BEFORE)
        if new:
            hashes_K, counts_K, since_2K = (
                np.concatenate(parts, axis=-1) for parts in zip(*new, strict=True)
            )
            order = np.argsort(-counts_K, kind="stable")  # they are in the order of their hashes
            hashes_V = np.append(hashes_V, hashes_K[order])
            counts_V = np.append(counts_V, counts_K[order])
            since_2R = np.concatenate([since_2R, since_2K[:, order]], axis=1)
        grown = Vocabulary(hashes_V, counts_V)

        def rare() -> Iterator[tuple[Int64s, Int64s]]:
            for batch in counts.distinct_ids():
                rare_U = grown.rows_of(batch.hashes_U) == UNKNOWN
                yield batch.hashes_U[rare_U], np.minimum(batch.counts_U[rare_U], counts.needed)

        return Vocabulary(hashes_V, counts_V, rare), since_2R, distinct

    def save(self, path: Path) -> None:
        """Writes hash and count as Parquet: the ids in the order of their table rows, then the rare
        ones.

        The rare ones are in row groups of their own.
        """
        known = np.stack([self.hashes_V, self.counts_V])
        write(
            path,
            ("hash", "count"),
            itertools.chain([known], map(np.stack, self.rare())),
            len(self.hashes_V),
        )

    @classmethod
    def load(cls, path: Path) -> Vocabulary:
        """Returns what `save` wrote. The rare ids are read when they are asked for.

        Raises:
            UserError: when the file is missing or damaged.
        """
        known, groups = row_groups(path)
        hashes_V, counts_V = read(path, groups[:known], 2)

        def rare() -> Iterator[tuple[Int64s, Int64s]]:
            for group in groups[known:]:
                hashes_U, counts_U = read(path, [group], 2)
                yield hashes_U, counts_U

        return cls(hashes_V, counts_V, rare)


EMPTY = Vocabulary(np.empty(0, np.int64), np.empty(0, np.int64))


class Kind:
    """See `Kind` of the package."""

    unknown = UNKNOWN
    takes_integers = False

    def fit(
        self, name: str, encoding: Encoding, ids: SeenIds, known: Vocabulary | None
    ) -> tuple[Encoding, Vocabulary, Int64s] | None:
        """See `Kind.fit`; None when it was not asked for and would have more rows than MOST."""
        grown, since_2R, distinct = (known or EMPTY).grown(ids.counts)
        if encoding.kind is None and grown.rows > MOST:
            return None
        encoding = replace(
            encoding, kind="vocabulary", rows=grown.rows, digest=grown.digest, distinct=distinct
        )
        return replace(encoding, min_count=ids.counts.needed + 1), grown, since_2R

    def load(self, path: Path, encoding: Encoding) -> Vocabulary | None:
        """See `Kind.load`."""
        loaded = Vocabulary.load(path)
        return loaded if (loaded.rows, loaded.digest) == (encoding.rows, encoding.digest) else None

    def rows_of(self, known: Vocabulary, distinct: pa.Array) -> Int64s:
        """See `Kind.rows_of`."""
        return known.rows_of(hashes_of(distinct))

    def lookup(self, known: Vocabulary) -> Lookup:
        """See `Kind.lookup`."""
        from sparrow.kernels.encode import Lookup  # torch, which preparing does without

        return Lookup("vocabulary", *known.by_hash)

    def moved(
        self, old: Encoding, new: Encoding, then: Vocabulary | None, now: Vocabulary | None
    ) -> Int64s | None:
        """See `Kind.moved`: by the ids."""
        if then is None or now is None:
            return None
        to_R = np.append(np.arange(FIRST), now.rows_of(then.hashes_V))
        to_R[FIRST:][to_R[FIRST:] == UNKNOWN] = -1
        return to_R

    def name_of(self, encoding: Encoding, row: int) -> str:
        """See `Kind.name_of`: only a rank is known."""
        return ("missing", "unknown")[row] if row < FIRST else f"no. {row - FIRST + 1} by frequency"
