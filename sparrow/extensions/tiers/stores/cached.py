"""`CachedStore`: rows in few bits, and fp32 frames for the hot ones (mixed-precision tables, arXiv
2010.11305).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from sparrow.core import UserError
from sparrow.core.pages import empty_rows
from sparrow.embeddings.spec import Component
from sparrow.embeddings.stores.store import (
    At,
    Beneath,
    External,
    First,
    InTransit,
    RowStore,
    level_of,
)
from sparrow.extensions.tiers.frames import exact_bytes, exact_fields, exact_frames
from sparrow.extensions.tiers.stores.ssd import SsdStore
from sparrow.kernels import embedding_bag, row_cache
from sparrow.kernels.embedding_bag import Rows, Table, Tables
from sparrow.kernels.row_cache import Frames, Moves
from sparrow.kernels.row_cache.policies import policy_of


class CachedStore(RowStore):
    """Rows of which some are in fp32 frames, where they are read and updated, and nowhere else.

    Each batch of training has its rows in or out; see `row_cache.admit`. The sequence of batches
    alone decides that.
    A row that leaves is rounded with the number of its last update, and not at all if it was not
    updated. `read` and `write` are for what is beneath the frames. A row that is written leaves its
    frame.

    If what is beneath is on an SSD, `fetch` gets the rows that have no exact frame some batches
    ahead. Who has such a frame is still decided when a batch is looked up. A row that had one
    before and has lost it is brought then.

    Args:
        component: whose rows these are. It says how many frames there are.
        rows: how many of its rows are here.
        dim: how many of its dimensions are here.
        beneath: a store of these rows. Those that are out are there.
        device: on which the rows learn.

    Raises:
        UserError: on a GPU.
    """

    slots_are_rows = False

    def __init__(
        self, component: Component, rows: int, dim: int, beneath: Beneath, device: str = "cpu"
    ) -> None:
        super().__init__()
        if device != "cpu":
            remedy = "leave it out, or use --device cpu"
            raise UserError(
                f"table {component.name!r}: its cache is for the CPU, and the rows are on a GPU;"
                f" {remedy}"
            )
        self.component = component
        self.beneath = beneath
        count = exact_frames(component, rows)
        self._fields = exact_fields(component, dim)
        self.exact_bytes = exact_bytes(component, dim)
        for name, field in self._fields.items():
            frames = empty_rows(*field.shape(count), dtype=field.dtype)
            frames.fill_(-1 if name == "tag" else 0)
            self.register_buffer(f"frame_{name}", frames, persistent=False)
        self._policy = policy_of(component.cache.policy)
        counted = rows * self._policy.bytes_row
        self.register_buffer("counts", torch.zeros(counted, dtype=torch.uint8), persistent=False)
        self.rows = rows
        self.batch = 0  # of training, so far
        self.settled = 0  # the last batch from which the rows have learnt
        self.hits = 0  # different rows of batches that were in
        self.used = 0  # and those that batches had
        self.most = 0  # different rows of a batch
        # rows in frames that batches under way have, by their number
        self._above: dict[int, Tensor] = {}

    @property
    def is_allocated(self) -> bool:
        """Whether there is memory for all rows beneath."""
        return self.beneath.is_allocated

    def frame(self, name: str) -> Tensor:
        """Returns a field of all frames."""
        return self.get_buffer(f"frame_{name}")

    @property
    def frames(self) -> Frames:
        """Which rows are in."""
        return Frames(
            rows=self.rows,
            tags_F=self.frame("tag"),
            stamps_F=self.frame("stamp"),
            counts_R=self.get_buffer("counts"),
            policy=self._policy,
        )

    @property
    def levels(self) -> tuple[Rows, ...]:
        """The frames, then the rows beneath."""
        component = self.component.in_frames
        names = [name for name in self._fields if name not in ("tag", "stamp", "changed")]
        above = level_of(
            component, {name: self.frame(name) for name in names}, self.frame("changed")
        )
        return above, *self.beneath.levels

    def slots_of(self, rows_N: Tensor) -> Tensor:
        """Returns the frames of rows that are in, and the places beneath of the others."""
        return self._slots(row_cache.slots_of(self.frames, rows_N), rows_N, self.beneath.slots_of)

    def pinned(self, rows_N: Tensor) -> Tensor:
        """Returns the same for rows that learn now."""
        return self._slots(row_cache.slots_of(self.frames, rows_N), rows_N, self.beneath.pinned)

    def admit(self, rows_N: Tensor, table: Table) -> Tensor:
        """Begin a batch of training: let its rows in as far as there is room. Returns their
        slots.
        """
        self.batch += 1
        evictable = min(self.batch - self.component.cache.protect, self.settled)
        moves = row_cache.admit(self.frames, rows_N, self.batch, evictable)
        self.hits += moves.hits
        self.used += moves.unique
        self.most = max(self.most, moves.unique)
        if len(moves.rows_L):
            self._move(moves, table)
        return self._slots(moves.slots_N, rows_N, self.beneath.pinned)

    def _move(self, moves: Moves, table: Table) -> None:
        """Copy rows into their frames, and those that were updated there back."""
        is_newer_L = (moves.old_L >= 0) & (self.frame("changed")[moves.frames_L] > 0)
        with self.beneath.overwritten(moves.old_L[is_newer_L]) as slots_V:
            old_L = torch.full_like(moves.old_L, -1)
            old_L[is_newer_L] = slots_V
            tables = Tables([replace(table, levels=self.levels)])
            embedding_bag.replace_rows(
                tables, moves.frames_L, self.beneath.pinned(moves.rows_L), old_L
            )

    def _slots(
        self, slots_N: Tensor, rows_N: Tensor, beneath: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Returns slots for what `row_cache` says of rows. beneath: of what has no frame."""
        frames = len(self.frame("tag"))
        if not self.beneath.slots_are_rows and (out_N := slots_N >= frames).any():
            slots_N[out_N] = frames + beneath(rows_N[out_N])
        return slots_N

    def begin_with(self, first: First) -> None:
        """Have a row beneath that was never written begin so."""
        self.beneath.begin_with(first)

    def settle(self) -> None:
        """The rows of all batches so far have learnt, or never will: they may leave."""
        self.settled = self.batch

    def read(self, at: At) -> dict[str, Tensor]:
        """Returns what is beneath the frames, see `RowStore.read`."""
        return self.beneath.read(at)

    @torch.no_grad()
    def write(self, at: At, fields: Mapping[str, Tensor], columns: slice = slice(None)) -> None:
        """Overwrite what is beneath the frames, see `RowStore.write`. The rows leave their frames
        as they are.
        """
        self.beneath.write(at, fields, columns)
        rows_U = torch.arange(self.rows)[at] if isinstance(at, slice) else at
        slots_U = row_cache.slots_of(self.frames, rows_U)
        tags_F = self.frame("tag")
        tags_F[slots_U[slots_U < len(tags_F)]] = -1

    # -- rows on an SSD beneath --------------------------------------------------------------------

    @property
    def _on_ssd(self) -> SsdStore:
        assert isinstance(self.beneath, SsdStore)
        return self.beneath

    def fetch(self, rows_N: Tensor, batch: int, settled: int) -> None:
        """Have the rows of a batch fetched that have no exact frame now, see `SsdStore.fetch`."""
        rows_U = rows_N.long().unique()
        is_out_U = row_cache.slots_of(self.frames, rows_U) >= len(self.frame("tag"))
        self._above[batch] = rows_U[~is_out_U]
        self._on_ssd.fetch(rows_U[is_out_U], batch, settled)

    def arrive(self, last: int | None = None) -> None:
        """Wait for the rows of batches, see `SsdStore.arrive`. last: the batch that is looked up
        now.
        """
        self._on_ssd.arrive(last)
        if last is None:
            return
        rows_U = self._above.pop(last, torch.zeros(0, dtype=torch.int64))
        # others were given up
        self._above = {batch: rows for batch, rows in self._above.items() if batch > last}
        lost_U = row_cache.slots_of(self.frames, rows_U) >= len(self.frame("tag"))
        if lost_U.any():
            self._on_ssd.bring(rows_U[lost_U], last)

    def give_back(self) -> None:
        """Forget what was borrowed."""
        self._on_ssd.give_back()

    @property
    def settled_to(self) -> int:
        """See `SsdStore.settled_to`."""
        return self._on_ssd.settled_to

    def settle_to(self, batch: int) -> None:
        """Hear that a batch and all before it have learnt, or never will."""
        self._on_ssd.settle_to(batch)

    @property
    @override
    def transit(self) -> Callable[[Mapping[int, Any]], InTransit] | None:
        return self.beneath.transit

    @override
    def external(
        self, seed: int, rows: tuple[int, int], columns: tuple[int, int]
    ) -> External | None:
        return self.beneath.external(seed, rows, columns)

    @override
    def adopt(self, part: External, learns: bool) -> bool:
        return self.beneath.adopt(part, learns)

    # -- frames in and out -------------------------------------------------------------------------

    def exact_rows(self, first: int = 0, last: int | None = None) -> dict[str, Tensor]:
        """Returns the frames that hold a row, field by field [U], the row numbers as "row", and the
        counts of rows.

        "age" is how many batches ago the row was used. "batch" is the number of batches so far.

        Args:
            first: the first row that is asked about.
            last: the row after the last one; by default all.
        """
        last = self.rows if last is None else last
        tags_F = self.frame("tag")
        held = ((tags_F >= first) & (tags_F < last)).nonzero()[:, 0]
        held_fields = {
            name: self.frame(name)[held] for name in self._fields if name not in ("tag", "stamp")
        }
        held_fields["row"] = tags_F[held]
        held_fields["age"] = self.batch - self.frame("stamp")[held]
        return {
            **held_fields,
            "batch": torch.tensor([self.batch]),
            "counts": self.get_buffer("counts")[first:last],
        }

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

    def recount(self, saved: Mapping[str, Tensor], first: int) -> None:
        """Take back the counts of some rows, the first of which is row `first` here."""
        counts_R = saved["counts"]
        own_R = self.get_buffer("counts")
        low = max(first, 0)
        high = min(first + len(counts_R), len(own_R))
        if low < high:
            own_R[low:high] = counts_R[low - first : high - first]


def ssd_of(store: RowStore) -> SsdStore | None:
    """Returns the store on an SSD that a store is, or that is beneath it; None if there is none."""
    lowest = store.beneath if isinstance(store, CachedStore) else store
    return lowest if isinstance(lowest, SsdStore) else None
