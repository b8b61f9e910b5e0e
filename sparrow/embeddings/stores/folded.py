from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from sparrow.embeddings.spec import Component
from sparrow.embeddings.stores.memory import MemoryStore
from sparrow.embeddings.stores.store import At, RowStore
from sparrow.kernels.embedding_bag import Rows, Table


class FoldedStore(RowStore):
    """All rows share a few that are zero. It is for callers that need the shapes of a lookup and
    not its values.
    """

    slots_are_rows = False
    FEW = 16

    def __init__(self, component: Component, rows: int, dim: int) -> None:
        super().__init__()
        self.held = MemoryStore(component, min(rows, self.FEW), dim)
        for name in self.held.names:
            self.held.get_buffer(name).zero_()

    @property
    def levels(self) -> tuple[Rows, ...]:
        """One level: the few rows."""
        return self.held.levels

    def slots_of(self, rows_N: Tensor) -> Tensor:
        """Returns the slots of the few rows, in turn."""
        return rows_N % len(self.held.get_buffer("touched"))

    def admit(self, rows_N: Tensor, table: Table) -> Tensor:
        """Returns the slots: every row has its place."""
        return self.slots_of(rows_N)

    def pinned(self, rows_N: Tensor) -> Tensor:
        """Returns the slots."""
        return self.slots_of(rows_N)

    def settle(self) -> None:
        """Do nothing."""

    def read(self, at: At) -> dict[str, Tensor]:
        """Raises NotImplementedError: nothing is kept of a row."""
        raise NotImplementedError

    def write(self, at: At, fields: Mapping[str, Tensor], columns: slice = slice(None)) -> None:
        """Raises NotImplementedError: nothing is kept of a row."""
        raise NotImplementedError
