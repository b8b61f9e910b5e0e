"""Rows on an SSD as a checkpoint has them: which blocks are where, and the rows that are newer than their blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from sparrow.embeddings.spec import Component
from sparrow.embeddings.stores.store import At
from sparrow.kernels.block_io import BlockMap, Blocks, Layout
from sparrow.kernels.embedding_bag import Rows, Table
from sparrow.kernels.formats import Field

First = Callable[[At], dict[str, Tensor]]
"""Rows -> the fields with which they begin. A slice has both ends and no step."""


WINDOW, PIECE = 128 << 20, 16 << 20  # bytes
PASSES = 16  # at most, through the newer rows
ROW, AGE = "row", "age"  # of the newer rows: their numbers, and for how many batches nobody used them; no fields


@dataclass(frozen=True, kw_only=True, eq=False)
class Saved:
    """A part of a component, on an SSD.

    Args:
        path: the file of its blocks.
        map: which block is where.
        bounds: 0, and where the rows of the cache, those of frames that stand by, and those that wait to be written end
            among the newer rows, which frames and queue hold.
        counts_R: uint8 [R]: how often batches used each row, see `row_cache.Frames`; [0] if nobody counts. It is there
            for a moment.
        batches: the number of the last batch that learnt, and of the last one whose uses are counted, which may have
            been looked at ahead.
        field: (name, first, last) -> a field of those of the newer rows, [last - first, ...], for a moment. Of `ROW` it
            is int32: their numbers, counted in the part, each once; -1 stands for a frame that is empty. Of `AGE` it is
            int32, and only for rows in frames: how many batches before the last one that learnt used them. It is
            negative for a batch that was looked at ahead.
        component: whose rows these are.
        seed: of the first values, which rows have that are nowhere.
        rows: the first row of the part and the one after its last.
        columns: its first dimension and the one after its last.
    """

    path: Path
    map: BlockMap
    bounds: tuple[int, int, int, int]
    counts_R: Tensor
    batches: tuple[int, int]
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

    def copied(self) -> Saved:
        """Returns one that holds the newer rows, and the counts of all, in memory of its own."""
        _, _, aged, count = self.bounds
        step = max(1, PIECE // self.layout.record_bytes)
        made = empty(self.layout.fields, count)
        made |= {ROW: torch.empty(count, dtype=torch.int32), AGE: torch.empty(aged, dtype=torch.int32)}
        for name, of in made.items():
            for first in range(0, len(of), step):
                of[first : first + step] = self.field(name, first, min(first + step, len(of)))
        counts_R = self.counts_R.clone()
        return replace(self, counts_R=counts_R, field=lambda name, first, last: made[name][first:last])

    def fields(self, first: int, last: int) -> dict[str, Tensor]:
        """Returns all fields of some of the newer rows."""
        return {name: self.field(name, first, last) for name in self.layout.fields}


class SavedStore(nn.Module):
    """Reads the rows of a checkpoint in their order. Only pieces of them are ever in memory.

    The newer rows are in another order. So those of `WINDOW` bytes, or of a share of all, are read at a
    time, in one pass through all.

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
        self._rows_U, order_U = saved.field(ROW, 0, saved.bounds[-1]).sort()
        self._order_U = order_U.int()
        self._window, self._newer = range(0), dict[str, Tensor]()
        self._blocks = Blocks(saved.path, saved.layout, table=saved.component.name, map=saved.map, is_written=False)

    def read(self, at: At) -> dict[str, Tensor]:
        """Returns what `RowStore.read` says, of a slice."""
        assert isinstance(at, slice) and self.first is not None
        rows_U, fields = torch.arange(at.start, at.stop), self._blocks.layout.fields
        made = empty(fields, len(rows_U))
        never_U = self._blocks.wait(self._blocks.fetch(rows_U, made, rows_U - at.start))
        low, high = torch.searchsorted(
            self._rows_U, torch.tensor([at.start, at.stop], dtype=self._rows_U.dtype)
        ).tolist()
        newer_V = self._rows_U[low:high] - at.start
        never_U[newer_V] = False
        if never_U.any():
            put_into(made, never_U.nonzero()[:, 0], self.first(rows_U[never_U]))
        put_into(made, newer_V, self._newest(low, high))
        return made

    def _newest(self, low: int, high: int) -> dict[str, Tensor]:
        """Returns all fields of some of the newer rows, counted in their order."""
        if not self._newer or low < self._window.start or high > self._window.stop:
            self._newer.clear()
            size = max(WINDOW, len(self._rows_U) * self._blocks.layout.record_bytes // PASSES)
            count = max(high - low, size // self._blocks.layout.record_bytes)
            self._window = range(low, min(low + count, len(self._rows_U)))
            self._newer = self._gathered(self._order_U[self._window.start : self._window.stop])
        place = slice(low - self._window.start, high - self._window.start)
        return {name: of[place] for name, of in self._newer.items()}

    def _gathered(self, at_V: Tensor) -> dict[str, Tensor]:
        """Returns all fields of some of the newer rows, which are at these places, in one pass."""
        fields, step = self._blocks.layout.fields, max(1, PIECE // self._blocks.layout.record_bytes)
        made = empty(fields, len(at_V))
        ordered_V, to_V = at_V.sort()
        for name, of in made.items():
            for first in range(0, len(self._rows_U), step):
                last = min(first + step, len(self._rows_U))
                low, high = torch.searchsorted(ordered_V, torch.tensor([first, last])).tolist()
                if low < high:
                    piece = self._saved.field(name, first, last)
                    of[to_V[low:high]] = piece[ordered_V[low:high] - first]
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


def empty(fields: Mapping[str, Field], rows: int, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """Returns memory for so many rows, field by field."""
    return {name: torch.empty(of.shape(rows), dtype=of.dtype, device=device) for name, of in fields.items()}


def put_into(held: Mapping[str, Tensor], at_U: Tensor, fields: Mapping[str, Tensor]) -> None:
    """Write fields [U, ...] into some rows of others."""
    for name, of in held.items():
        of[at_U] = fields[name].to(of)
