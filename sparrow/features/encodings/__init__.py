"""How the ids of a table are numbered. One file per kind: file `x.py` has `Kind`, which an encoding of kind "x" is.

A kind is chosen in a schema's `[encodings]`. What depends on it is asked of its `Kind`.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, get_args

import pyarrow as pa

from sparrow.core.arrays import Int64s
from sparrow.features.encodings._counts import BEFORE, FIRST, MIN_COUNT, MISSING, UNKNOWN, Counts
from sparrow.features.encodings._ids import SeenIds
from sparrow.features.schema import KINDS, Encoding


class Known(Protocol):
    """The ids that a table knows."""

    def rare(self) -> Iterator[tuple[Int64s, Int64s]]:
        """Ids that are not yet known, by hash, and how often they were seen (min_count - 1 times at most), int64."""
        ...

    def save(self, path: Path) -> None:
        """Write, for `Kind.load`."""
        ...


class Kind(Protocol):
    """What a member offers."""

    @property
    def unknown(self) -> int | None:
        """The number of every unknown id; None where any id is known."""
        ...

    @property
    def takes_integers(self) -> bool:
        """Whether only integers can be ids."""
        ...

    def fitted(self, name: str, encoding: Encoding, ids: SeenIds, known: Any) -> tuple[Encoding, Any, Any] | None:
        """Fit what an encoding lacks; None when another kind should be taken.

        Args:
            name: the table's, for errors.
            encoding: what is given.
            ids: what training holds.
            known: `Known` of an earlier log, which is to be grown, or None.

        Returns:
            The whole encoding, its `Known` or None, and since when ids are known, int64 [2, rows], or None.
        """
        ...

    def load(self, path: Path, encoding: Encoding) -> Any:
        """The `Known` of a file; None when the file is not that encoding's. UserError when it is damaged."""
        ...

    def rows_of(self, known: Any, distinct: pa.Array) -> Int64s:
        """Numbers int64 [U] of distinct ids, int64 or, hashed, uint64."""
        ...

    def moved(self, old: Encoding, new: Encoding, then: Any, now: Any) -> Int64s | None:
        """For each number of an earlier log that of the same id now, or -1; None when nobody can tell."""
        ...

    def name_of(self, encoding: Encoding, row: int) -> str:
        """A number in words, for people."""
        ...


def kind_of(encoding: Encoding) -> Kind:
    """The kind of an encoding, hash where none is chosen yet."""
    return named(encoding.kind or "hash")


def named(kind: str) -> Kind:
    """The kind of this name."""
    assert kind in get_args(KINDS)
    made: Kind = import_module(f"{__name__}.{kind}").Kind()
    return made


__all__ = [
    "BEFORE",
    "FIRST",
    "MIN_COUNT",
    "MISSING",
    "UNKNOWN",
    "Counts",
    "Kind",
    "Known",
    "SeenIds",
    "kind_of",
    "named",
]
