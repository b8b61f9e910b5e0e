from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sparrow.core.errors import UserError, require
from sparrow.embeddings.addressing._size import Size


@dataclass(frozen=True)
class Direct:
    """Id i is row i; what becomes of ids outside [0, rows) is for `TableSpec.oov_row` to say."""

    rows: int
    is_identity = True

    def __post_init__(self) -> None:
        require(least=1, rows=self.rows)

    @property
    def ids(self) -> int:
        """As many as rows."""
        return self.rows

    def components(self, dim: int) -> tuple[Size, ...]:
        """One."""
        return (Size("", self.rows, dim),)

    def rows_of(self, ids_N: Tensor) -> tuple[Tensor, ...]:
        """The ids themselves."""
        return (ids_N,)

    def combine(self, dim: int) -> None:
        """There is nothing to combine."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """A row for every id that the log's encoding numbers."""

    def build(self, rows: int, is_numbered: bool) -> Direct:
        """See `AddressingConfig.build`."""
        if not is_numbered:
            raise UserError("direct: the log's ids are hashes, which are no row numbers; use hashed, or prepare anew")
        return Direct(rows)
