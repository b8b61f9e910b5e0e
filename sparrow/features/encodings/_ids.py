from __future__ import annotations

from typing import Protocol

from sparrow.features.encodings._counts import Counts


class SeenIds(Protocol):
    """What training holds of a table's ids. low, high: of those that are integers; hashed: whether
    some are not.
    """

    counts: Counts
    low: int
    high: int
    hashed: bool

    def distinct(self) -> int:
        """Returns how many distinct ids there are."""
        ...
