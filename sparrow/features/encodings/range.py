"""Integers low..high become 2, 3, ... where they are known."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from sparrow.core.arrays import Int32s, Int64s
from sparrow.core.errors import UserError
from sparrow.features.encodings._counts import BEFORE, FIRST, UNKNOWN, Counts
from sparrow.features.encodings._files import read, row_groups, write
from sparrow.features.encodings._ids import SeenIds
from sparrow.features.hashing import hash_ids
from sparrow.features.schema import Encoding

if TYPE_CHECKING:
    from sparrow.kernels.encode import Lookup


@dataclass(frozen=True, eq=False)
class Range:
    """The integers of a table, of which number low + i has row i + FIRST, when it is known.

    counts_I: int32 [I], KNOWN, or how often each was seen, min_count - 1 times at most.
    """

    low: int
    counts_I: Int32s

    KNOWN = -1

    def rows_of(self, integers_U: Int64s) -> Int64s:
        """Returns the table row of each integer, int64 [U]; 1 for those outside, and for those that
        are not known.
        """
        inside_U = (integers_U >= self.low) & (integers_U <= self.low + len(self.counts_I) - 1)
        place_U = np.where(inside_U, integers_U, self.low) - self.low
        return np.where(inside_U & (self.counts_I[place_U] == self.KNOWN), place_U + FIRST, UNKNOWN)

    def rare(self) -> Iterator[tuple[Int64s, Int64s]]:
        """Yields the integers that are not yet known, by their hashes, and how often each was seen,
        int64 each.
        """
        place_U = np.flatnonzero(self.counts_I > 0)
        yield hash_ids(pa.array(self.low + place_U)), self.counts_I[place_U].astype(np.int64)

    def grown(self, counts: Counts, low: int, high: int) -> tuple[Range, Int64s]:
        """Returns the range low..high with what `counts` saw of it, and since when its integers are
        known.

        Integers that were known before are so from the start.

        Args:
            counts: has taken in what this range's `rare` gives, too.
            low: the lowest integer.
            high: the highest integer.

        Returns:
            The range, and since when each table row is known, int64 [2, rows].
        """
        counts_I = np.zeros(high - low + 1, np.int32)
        since_2R = np.full((2, high - low + 1 + FIRST), BEFORE)
        known_I = np.zeros(len(counts_I), np.bool_)
        first = max(low, self.low)
        last = min(high + 1, self.low + len(self.counts_I))
        if first < last:
            known_I[first - low : last - low] = (
                self.counts_I[first - self.low : last - self.low] == self.KNOWN
            )
        hashes_I = hash_ids(pa.array(np.arange(low, high + 1)))
        order = np.argsort(hashes_I)
        hashes_I = hashes_I[order]
        for batch in counts.distinct_ids():
            at_U = np.minimum(np.searchsorted(hashes_I, batch.hashes_U), len(order) - 1)
            in_range_U = hashes_I[at_U] == batch.hashes_U
            place = order[at_U[in_range_U]]
            counts_I[place] = np.minimum(batch.counts_U[in_range_U], counts.needed)
            new = batch.known_U[in_range_U] & ~known_I[place]
            since_2R[:, place[new] + FIRST] = batch.since_2U[:, in_range_U][:, new]
            counts_I[place[new]] = self.KNOWN
        counts_I[known_I] = self.KNOWN
        return Range(low, counts_I), since_2R

    def with_all_known(self) -> Range:
        """Returns the range with all its integers known."""
        return Range(self.low, np.full_like(self.counts_I, self.KNOWN))

    def save(self, path: Path) -> None:
        """Writes the counts as Parquet."""
        write(path, ("count",), [self.counts_I[None]], len(self.counts_I))

    @classmethod
    def load(cls, path: Path, low: int) -> Range:
        """Returns what `save` wrote, as the range that begins with `low`.

        Raises:
            UserError: when the file is missing or damaged.
        """
        return cls(low, read(path, row_groups(path)[1], 1)[0].astype(np.int32))


class Kind:
    """See `Kind` of the package."""

    unknown = UNKNOWN
    takes_integers = True

    def fit(
        self, name: str, encoding: Encoding, ids: SeenIds, known: Range | None
    ) -> tuple[Encoding, Range, Int64s]:
        """See `Kind.fit`."""
        encoding = self._sized(name, self._widened(encoding, ids) if known else encoding, ids)
        assert encoding.low is not None
        assert encoding.high is not None
        grown, since_2R = (known or Range(encoding.low, np.empty(0, np.int32))).grown(
            ids.counts, encoding.low, encoding.high
        )
        return encoding, grown, since_2R

    def _widened(self, encoding: Encoding, ids: SeenIds) -> Encoding:
        """A range that reaches to the highest integer, unless that would leave most of it empty."""
        assert encoding.low is not None
        assert encoding.high is not None
        rows = ids.high - encoding.low + 1 + FIRST
        most = 4 * (encoding.high - encoding.low + ids.distinct()) + 1000
        if ids.hashed or ids.high <= encoding.high or rows > most:
            return encoding
        return replace(encoding, high=ids.high, rows=rows)

    def _sized(self, name: str, encoding: Encoding, ids: SeenIds) -> Encoding:
        low = ids.low if encoding.low is None else encoding.low
        high = ids.high if encoding.high is None else encoding.high
        if high < low:
            remedy = "use kind 'vocabulary' or 'hash', or give low and high"
            raise UserError(f"encodings.{name}: no integers in training to number; {remedy}")
        rows = high - low + 1 + FIRST
        if encoding.rows not in (None, rows):
            remedy = f"{low}..{high} needs {rows}; leave rows out"
            raise UserError(
                f"encodings.{name}.rows: {encoding.rows} for kind 'range', but {remedy}"
            )
        distinct = ids.distinct() if encoding.distinct is None else encoding.distinct
        min_count = ids.counts.needed + 1
        return replace(
            encoding,
            kind="range",
            min_count=min_count,
            low=low,
            high=high,
            rows=rows,
            distinct=distinct,
        )

    def load(self, path: Path, encoding: Encoding) -> Range | None:
        """See `Kind.load`."""
        loaded = Range.load(path, encoding.low or 0)
        return loaded if len(loaded.counts_I) + FIRST == encoding.rows else None

    def rows_of(self, known: Range, distinct: pa.Array) -> Int64s:
        """See `Kind.rows_of`."""
        return known.rows_of(distinct.to_numpy(zero_copy_only=False))

    def lookup(self, known: Range) -> Lookup:
        """See `Kind.lookup`."""
        from sparrow.kernels.encode import Lookup  # torch, which preparing does without

        return Lookup("range", known.counts_I, low=known.low)

    def moved(
        self, old: Encoding, new: Encoding, then: Range | None, now: Range | None
    ) -> Int64s | None:
        """See `Kind.moved`: by how far the ranges' ends lie apart."""
        if old.low is None or new.low is None:
            return None
        same = np.arange(old.rows or 0)
        to_R = same + (old.low - new.low)
        to_R[(to_R < FIRST) | (to_R >= (new.rows or 0))] = -1
        to_R[:FIRST] = same[:FIRST]
        return to_R

    def name_of(self, encoding: Encoding, row: int) -> str:
        """See `Kind.name_of`: the integer."""
        return (
            ("missing", "unknown")[row] if row < FIRST else str(row + (encoding.low or 0) - FIRST)
        )
