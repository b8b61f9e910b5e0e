"""Rows on an SSD as a checkpoint has them: which blocks are where, and the rows that are newer than their blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from sparrow.embeddings.spec import Component
from sparrow.embeddings.tiers.store import At
from sparrow.kernels.block_io import BlockMap, Blocks, Layout
from sparrow.kernels.embedding_bag import Rows, Table

First = Callable[[Tensor], dict[str, Tensor]]
"""Rows int64 [U] -> the fields with which they begin."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Saved:
    """A part of a component, on an SSD.

    Args:
        path: the file of its blocks.
        map: which block is where.
        rows_U: int64 [U], ascending: the rows, counted in the part, that frames and queue hold.
        field: (name, first, last) -> a field of those of them, [last - first, ...].
        component: whose rows these are.
        seed: of the first values, which rows have that are nowhere.
        rows: the first row of the part and the one after its last.
        columns: its first dimension and the one after its last.
    """

    path: Path
    map: BlockMap
    rows_U: Tensor
    field: Callable[[str, int, int], Tensor]
    component: Component
    seed: int
    rows: tuple[int, int]
    columns: tuple[int, int]

    @property
    def layout(self) -> Layout:
        """How its rows lie in blocks."""
        fields = self.component.fields_of(self.columns[1] - self.columns[0])
        return Layout(fields=fields, rows=self.rows[1] - self.rows[0])

    def fields(self, first: int, last: int) -> dict[str, Tensor]:
        """Returns all fields of some of the newer rows."""
        return {name: self.field(name, first, last) for name in self.layout.fields}


class SavedStore(nn.Module):
    """Reads the rows of a checkpoint in their order. Only pieces of them are ever in memory.

    Args:
        saved: what the checkpoint has.

    Raises:
        UserError: when the file of blocks is missing, cut or another one.
    """

    slots_are_rows = False
    is_allocated = False

    def __init__(self, saved: Saved) -> None:
        super().__init__()
        self.first: First | None = None  # whoever made the store says it
        self._saved = saved
        self._blocks = Blocks(saved.path, saved.layout, table=saved.component.name, map=saved.map, is_written=False)

    def read(self, at: At) -> dict[str, Tensor]:
        """Returns what `RowStore.read` says, of a slice."""
        assert isinstance(at, slice) and self.first is not None
        rows_U, fields = torch.arange(at.start, at.stop), self._blocks.layout.fields
        made = {name: torch.empty(of.shape(len(rows_U)), dtype=of.dtype) for name, of in fields.items()}
        never_U = self._blocks.wait(self._blocks.fetch(rows_U, made, rows_U - at.start))
        low, high = torch.searchsorted(self._saved.rows_U, torch.tensor([at.start, at.stop])).tolist()
        newer_V = self._saved.rows_U[low:high] - at.start
        never_U[newer_V] = False
        if never_U.any():
            put_into(made, never_U.nonzero()[:, 0], self.first(rows_U[never_U]))
        put_into(made, newer_V, self._saved.fields(low, high))
        return made

    def close(self) -> None:
        """Let go of the file."""
        self._blocks.close()

    # -- what is not asked of rows that are only read -------------------------------------------------------------

    @property
    def levels(self) -> tuple[Rows, ...]:
        """None."""
        return ()

    def slots_of(self, rows_N: Tensor) -> Tensor:
        """Fails."""
        raise AssertionError("these rows are only read")

    def admit(self, rows_N: Tensor, table: Table) -> Tensor:
        """Fails."""
        raise AssertionError("these rows are only read")

    def pinned(self, rows_N: Tensor) -> Tensor:
        """Fails."""
        raise AssertionError("these rows are only read")

    def settle(self) -> None:
        """Fails."""
        raise AssertionError("these rows are only read")

    def write(self, at: At, fields: Mapping[str, Tensor], columns: slice = slice(None)) -> None:
        """Fails."""
        raise AssertionError("these rows are only read")


def put_into(held: Mapping[str, Tensor], at_U: Tensor, fields: Mapping[str, Tensor]) -> None:
    """Write fields [U, ...] into some rows of others."""
    for name, of in held.items():
        of[at_U] = fields[name].to(of)
