from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from sparrow.core.errors import UserError, require
from sparrow.embeddings.addressing._size import LogTable, Numbering, Size, Traits


@dataclass(frozen=True)
class Cut:
    """The first `frequent` ids, which are the most frequent ones, have a row each. All others share
    one row.

    rows: how many ids there are.
    """

    rows: int
    frequent: int
    traits = Traits()

    @property
    def ids(self) -> int:
        """As many ids as the log has."""
        return self.rows

    def components(self, dim: int) -> tuple[Size, ...]:
        """Returns one component."""
        return (Size("", self.frequent + 1, dim),)

    def rows_of(self, ids_N: Tensor) -> tuple[Tensor, ...]:
        """Returns the row of each id in each component, int64 [N]."""
        return (ids_N.clamp(max=self.frequent),)

    def combine(self, dim: int) -> None:
        """Returns None, because there is nothing to combine."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Frequent ids keep a row of their own, all others share one.

    rows: of the table then, the shared one among them. fraction: of the rows of the log, instead of
    `rows`.
    """

    rows: int | None = None
    fraction: float | None = None

    def __post_init__(self) -> None:
        require(least=2, rows=self.rows)
        require(above=0, most=1, fraction=self.fraction)
        if (self.rows is None) == (self.fraction is None):
            raise UserError("rows, fraction: give one of the two")

    def build(self, ids: Numbering) -> Cut:
        """Returns the addressing of a table with these ids."""
        ids.check_frequent_first("cut")
        rows = (
            self.rows
            if self.rows is not None
            else max(2, round(ids.rows * float(self.fraction or 0)))
        )
        return Cut(ids.rows, min(rows, ids.rows) - 1)

    def settled(self, tables: Sequence[LogTable]) -> list[Config]:
        """Returns these settings with what the log decides, for each table."""
        return [
            replace(self, rows=max(2, self.build(table.ids).frequent + 1), fraction=None)
            for table in tables
        ]
