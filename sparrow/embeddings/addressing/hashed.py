from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparrow.core.errors import require
from sparrow.core.mixing import splitmix64
from sparrow.embeddings.addressing._size import LogTable, Numbering, Size, Traits


@dataclass(frozen=True)
class Hashed:
    """Any int64 id but 0 has a row of 1 <= row < rows, by a mix of id + seed (splitmix64) modulo
    rows - 1.

    Id 0 stands for a missing one and has row 0 to itself, so that "missing" is not what some ids
    happen to be. Two ids may share a row. A table of one row has it for all.
    """

    rows: int
    seed: int = 0
    ids = None
    traits = Traits()

    def __post_init__(self) -> None:
        require(least=1, rows=self.rows)

    def components(self, dim: int) -> tuple[Size, ...]:
        """Returns one component."""
        return (Size("", self.rows, dim),)

    def rows_of(self, ids_N: Tensor) -> tuple[Tensor, ...]:
        """Returns the row of each id in each component, int64 [N]."""
        rows_N = by_hash(ids_N, 1, max(self.rows, 2), self.seed)
        return (torch.where(ids_N == 0, 0, rows_N.clamp(max=self.rows - 1)),)

    def combine(self, dim: int) -> None:
        """Returns None, because there is nothing to combine."""


def by_hash(ids_N: Tensor, first: int, rows: int, seed: int = 0) -> Tensor:
    """Returns one of the rows first <= row < rows for each id, by a mix of id + seed
    (splitmix64).
    """
    h_N = (
        splitmix64(ids_N + (seed + 1) * 0x9E3779B97F4A7C15 % (1 << 63))
        & torch.iinfo(torch.int64).max
    )
    return first + h_N % (rows - first)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Ids share rows by chance. rows: as many as the log's encoding gives the table, by default.
    seed: of the hash.
    """

    rows: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        require(least=1, rows=self.rows)

    def build(self, ids: Numbering) -> Hashed:
        """Returns the addressing of a table with these ids."""
        return Hashed(self.rows or ids.rows, self.seed)

    def settled(self, tables: Sequence[LogTable]) -> list[Config]:
        """Returns these settings with what the log decides, for each table."""
        return [replace(self, rows=self.build(table.ids).rows) for table in tables]
