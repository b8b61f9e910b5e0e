from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from sparrow.core.errors import require
from sparrow.embeddings.addressing._size import LogTable, Numbering, Size, Traits


@dataclass(frozen=True)
class Direct:
    """Id i has row i. `TableSpec.oov_row` says what becomes of ids outside [0, rows)."""

    rows: int
    traits = Traits(is_identity=True)

    def __post_init__(self) -> None:
        require(least=1, rows=self.rows)

    @property
    def ids(self) -> int:
        """As many ids as rows."""
        return self.rows

    def components(self, dim: int) -> tuple[Size, ...]:
        """Returns one component."""
        return (Size("", self.rows, dim),)

    def rows_of(self, ids_N: Tensor) -> tuple[Tensor, ...]:
        """Returns the ids themselves."""
        return (ids_N,)

    def combine(self, dim: int) -> None:
        """Returns None, because there is nothing to combine."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """A row for every id that the log's encoding numbers."""

    def build(self, ids: Numbering) -> Direct:
        """Returns the addressing of a table with these ids."""
        ids.check_numbered("direct")
        return Direct(ids.rows)

    def settled(self, tables: Sequence[LogTable]) -> list[Config]:
        """Returns these settings, which have no size."""
        return [self for _ in tables]
