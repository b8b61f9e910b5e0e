"""Strings and integers become hashes of 63 bits; any value is legal, and a missing one is 0."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from sparrow.core.arrays import Int64s
from sparrow.features.encodings._ids import SeenIds
from sparrow.features.hashing import hashes_of
from sparrow.features.schema import Encoding

if TYPE_CHECKING:
    from sparrow.kernels.encode import Lookup


class Kind:
    """See `Kind` of the package."""

    unknown = None
    takes_integers = False

    def fit(
        self, name: str, encoding: Encoding, ids: SeenIds, known: None
    ) -> tuple[Encoding, None, None]:
        """See `Kind.fit`: as many rows as a power of two of at least twice the distinct ids."""
        distinct = ids.distinct() if encoding.distinct is None else encoding.distinct
        rows = encoding.rows or max(16, 1 << (2 * distinct - 1).bit_length())
        return replace(encoding, kind="hash", rows=rows, distinct=distinct), None, None

    def load(self, path: Path, encoding: Encoding) -> None:
        """There is no file."""

    def rows_of(self, known: None, distinct: pa.Array) -> Int64s:
        """See `Kind.rows_of`: the hashes."""
        return hashes_of(distinct)

    def lookup(self, known: None) -> Lookup:
        """See `Kind.lookup`."""
        from sparrow.kernels.encode import Lookup  # torch, which preparing does without

        return Lookup("hash")

    def moved(self, old: Encoding, new: Encoding, then: None, now: None) -> None:
        """A hash does not tell its id."""

    def name_of(self, encoding: Encoding, row: int) -> str:
        """See `Kind.name_of`: the hash's first digits."""
        return f"#{row:016x}"[:9] if row else "missing"
