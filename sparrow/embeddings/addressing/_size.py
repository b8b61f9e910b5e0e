from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from torch import Tensor


class Size(NamedTuple):
    """A component of a table: R rows of D columns.

    name: "" for the only one. begin: with what every number begins; by default they are drawn, as the table says.
    """

    name: str
    rows: int
    dim: int
    begin: float | None = None


class Numbering(NamedTuple):
    """How the ids of a log's table are numbered.

    rows: as many as the log's encoding gives the table. order: "frequency" for ids 0 <= id < rows of which the frequent
    ones come first, "value" for ids 0 <= id < rows in another order, "hash" for hashes of 63 bits.
    """

    rows: int
    order: Literal["frequency", "value", "hash"] = "frequency"

    @property
    def is_numbered(self) -> bool:
        """Whether ids are 0 <= id < rows."""
        return self.order != "hash"


class LogTable(NamedTuple):
    """What an addressing may ask of a log's table before it settles its sizes.

    ids: how they are numbered. dim: D of a vector. counts: returns how often training rows have each id, int64 [rows],
    or only how many ids they have, [1], where ids are hashes.
    """

    ids: Numbering
    dim: int
    counts: Callable[[], Tensor]
