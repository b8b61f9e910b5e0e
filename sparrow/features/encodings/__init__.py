"""How the ids of a table are numbered. One file per kind: file `x.py` has `Kind`, which an encoding
of kind "x" is.

A kind is chosen in a schema's `[encodings]`. What depends on it is asked of its `Kind`.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, get_args

import pyarrow as pa

from sparrow.core.arrays import Int64s
from sparrow.features.encodings._counts import BEFORE, FIRST, MIN_COUNT, MISSING, UNKNOWN, Counts
from sparrow.features.encodings._ids import SeenIds
from sparrow.features.schema import KINDS, Encoding

if TYPE_CHECKING:
    from sparrow.kernels.encode import Lookup


class Known(Protocol):
    """The ids that a table knows."""

    def rare(self) -> Iterator[tuple[Int64s, Int64s]]:
        """Yields ids that are not yet known, by hash, and how often each was seen, int64 each.

        They were seen min_count - 1 times at most.
        """
        ...

    def save(self, path: Path) -> None:
        """Writes a file, for `Kind.load`."""
        ...


class Kind(Protocol):
    """What each kind of encoding offers."""

    @property
    def unknown(self) -> int | None:
        """The number of every unknown id; None where any id is known."""
        ...

    @property
    def takes_integers(self) -> bool:
        """Whether only integers can be ids."""
        ...

    def fit(
        self, name: str, encoding: Encoding, ids: SeenIds, known: Any
    ) -> tuple[Encoding, Any, Any] | None:
        """Returns an encoding with what it lacks fitted; None when another kind should be taken.

        Args:
            name: the table's, for errors.
            encoding: what is given.
            ids: what training holds.
            known: the `Known` of an earlier log, which is to be grown, or None.

        Returns:
            The whole encoding, its `Known` or None, and since when ids are known, int64 [2, rows],
            or None.
        """
        ...

    def load(self, path: Path, encoding: Encoding) -> Any:
        """Returns the `Known` of a file; None when the file is not that encoding's.

        Raises:
            UserError: when the file is missing or damaged.
        """
        ...

    def rows_of(self, known: Any, distinct: pa.Array) -> Int64s:
        """Returns the numbers of distinct ids, int64 [U]. The ids are int64 or, hashed, uint64."""
        ...

    def lookup(self, known: Any) -> Lookup:
        """Returns how a request's ids are numbered by compiled code; of kind "refused" where only
        `rows_of` can.
        """
        ...

    def moved(self, old: Encoding, new: Encoding, then: Any, now: Any) -> Int64s | None:
        """Returns for each number of an earlier log the number of the same id now, or -1. None when
        nobody can tell.

        Args:
            old: the earlier log's encoding.
            new: the encoding now.
            then: the earlier log's `Known`, or None.
            now: the `Known` now, or None.
        """
        ...

    def name_of(self, encoding: Encoding, row: int) -> str:
        """Returns the id of a number in words, for people."""
        ...


def kind_of(encoding: Encoding) -> Kind:
    """Returns the kind of an encoding; hash where none is chosen yet."""
    return load_kind(encoding.kind or "hash")


def load_kind(kind: str) -> Kind:
    """Returns the kind of this name."""
    assert kind in get_args(KINDS)
    member: Kind = import_module(f"{__name__}.{kind}").Kind()
    return member


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
    "load_kind",
]
