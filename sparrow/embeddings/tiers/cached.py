"""`CachedStore`: rows in few bits, and fp32 frames for the hot ones (mixed-precision tables, arXiv 2010.11305)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from sparrow.core import UserError
from sparrow.core.pages import empty_rows
from sparrow.embeddings.spec import Component
from sparrow.embeddings.tiers.store import At, RowStore, chosen_device, level_of
from sparrow.kernels import embedding_bag, row_cache
from sparrow.kernels.embedding_bag import Rows, Table, Tables
from sparrow.kernels.row_cache import Frames


class CachedStore(nn.Module):
    """Rows of which some are in fp32 frames, where they are read and updated, and nowhere else.

    Each batch of training has its rows in or out; see `row_cache.admit`. The sequence of batches alone decides that.
    A row that leaves is rounded with the number of its last update, and not at all if it was not updated. `read` and
    `write` are for what is beneath the frames. A row that is written leaves its frame.

    Args:
        component: whose rows these are. It says how many frames there are.
        rows: how many of its rows are here.
        dim: how many of its dimensions are here.
        beneath: a store of these rows, whose slots are rows. Those that are out are there.

    Raises:
        UserError: on a GPU.
    """

    slots_are_rows = False
    is_allocated = True

    def __init__(self, component: Component, rows: int, dim: int, beneath: RowStore) -> None:
        super().__init__()
        if chosen_device() != "cpu":
            remedy = "leave it out, or use --device cpu"
            raise UserError(f"table {component.name!r}: its cache is for the CPU, and the rows are on a GPU; {remedy}")
        self.component = component
        assert beneath.slots_are_rows
        self.beneath = beneath
        count = component.frames(rows)
        self._fields = component.frame_fields(dim)
        for name, field in self._fields.items():
            made = empty_rows(*field.shape(count), dtype=field.dtype).fill_(-1 if name == "tag" else 0)
            self.register_buffer(f"frame_{name}", made, persistent=False)
        counted = rows if component.cache.policy == "lfu" else 0
        self.register_buffer("counts", torch.zeros(counted, dtype=torch.uint8), persistent=False)
        self.rows = rows
        self.batch = 0  # of training, so far
        self.settled = 0  # the last batch from which the rows have learnt
        self.hits = 0  # different rows of batches that were in
        self.used = 0  # and those that batches had
        self.most = 0  # different rows of a batch

    def frame(self, name: str) -> Tensor:
        """Returns a field of all frames."""
        return self.get_buffer(f"frame_{name}")

    @property
    def frames(self) -> Frames:
        """Which rows are in."""
        counts_R = self.get_buffer("counts")
        return Frames(rows=self.rows, tags_F=self.frame("tag"), stamps_F=self.frame("stamp"), counts_R=counts_R)

    @property
    def levels(self) -> tuple[Rows, ...]:
        """The frames, then the rows beneath."""
        component = self.component.in_frames
        names = [name for name in self._fields if name not in ("tag", "stamp", "changed")]
        above = level_of(component, {name: self.frame(name) for name in names}, self.frame("changed"))
        return above, *self.beneath.levels

    def slots_of(self, rows_N: Tensor) -> Tensor:
        """Returns the frames of rows that are in, and the places beneath of the others."""
        return row_cache.slots_of(self.frames, rows_N)

    def admit(self, rows_N: Tensor, table: Table) -> Tensor:
        """Begin a batch of training: let its rows in as far as there is room. Returns their slots."""
        self.batch += 1
        evictable = min(self.batch - self.component.cache.protect, self.settled)
        moves = row_cache.admit(self.frames, rows_N, self.batch, evictable)
        self.hits += moves.hits
        self.used += moves.unique
        self.most = max(self.most, moves.unique)
        if len(moves.rows_L):
            embedding_bag.replace_rows(Tables([table]), moves.frames_L, moves.rows_L, moves.old_L)
        return moves.slots_N

    def settle(self) -> None:
        """The rows of all batches so far have learnt, or never will: they may leave."""
        self.settled = self.batch

    def read(self, at: At) -> dict[str, Tensor]:
        """Returns what is beneath the frames, see `RowStore.read`."""
        return self.beneath.read(at)

    @torch.no_grad()
    def write(self, at: At, fields: Mapping[str, Tensor], columns: slice = slice(None)) -> None:
        """Overwrite what is beneath the frames, see `RowStore.write`. The rows leave their frames as they are."""
        self.beneath.write(at, fields, columns)
        rows_U = torch.arange(self.rows)[at] if isinstance(at, slice) else at
        slots_U = self.slots_of(rows_U)
        tags_F = self.frame("tag")
        tags_F[slots_U[slots_U < len(tags_F)]] = -1

    # -- frames in and out ----------------------------------------------------------------------------------------

    def saved(self, first: int = 0, last: int | None = None) -> dict[str, Tensor]:
        """Returns the frames that hold a row, field by field [U], the row numbers as "row", and the counts of rows.

        "age" is how many batches ago the row was used. "batch" is the number of batches so far.

        Args:
            first: the first row that is asked about.
            last: the row after the last one; by default all.
        """
        last = self.rows if last is None else last
        tags_F = self.frame("tag")
        held = ((tags_F >= first) & (tags_F < last)).nonzero()[:, 0]
        found = {name: self.frame(name)[held] for name in self._fields if name not in ("tag", "stamp")}
        found["row"] = tags_F[held]
        found["age"] = self.batch - self.frame("stamp")[held]
        return {**found, "batch": torch.tensor([self.batch]), "counts": self.get_buffer("counts")[first:last]}

    @torch.no_grad()
    def restore(self, rows_U: Tensor, fields: Mapping[str, Tensor], batch: int) -> Tensor:
        """Take back frames that were saved. Returns which rows found no frame, bool [U]."""
        self.batch = self.settled = batch
        frames_U = row_cache.free_frames(self.frames, rows_U)
        fits_U = frames_U >= 0
        for name in self._fields:
            if name not in ("tag", "stamp"):
                self.frame(name)[frames_U[fits_U]] = fields[name][fits_U]
        self.frame("tag")[frames_U[fits_U]] = rows_U[fits_U].int()
        self.frame("stamp")[frames_U[fits_U]] = (batch - fields["age"][fits_U]).int()
        return ~fits_U

    def recount(self, counts_R: Tensor, first: int) -> None:
        """Take back the counts of some rows, the first of which is row `first` here."""
        mine_R = self.get_buffer("counts")
        low, high = max(first, 0), min(first + len(counts_R), len(mine_R))
        if low < high:
            mine_R[low:high] = counts_R[low - first : high - first]
