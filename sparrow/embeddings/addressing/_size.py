from __future__ import annotations

from typing import Literal, NamedTuple


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
