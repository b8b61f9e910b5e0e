"""`SsdStore`: rows on an SSD, of which some are in frames in memory (MTrainS, arXiv 2305.01515,
section 5).
"""

from __future__ import annotations

import itertools
import os
import secrets
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
from torch import Tensor
from typing_extensions import override

from sparrow.core import UserError
from sparrow.core.pages import HUGE, empty_rows
from sparrow.embeddings.spec import Component, Placement
from sparrow.embeddings.stores.store import At, Beneath, External, First, InTransit, level_of
from sparrow.extensions.tiers.folders import make_folder
from sparrow.extensions.tiers.frames import tier_frames
from sparrow.extensions.tiers.stores.flights import Flights
from sparrow.extensions.tiers.stores.in_order import InOrder
from sparrow.extensions.tiers.stores.saved import AGE, ROW, Saved, empty, put_into, take_rows
from sparrow.extensions.tiers.stores.spare import Spare
from sparrow.kernels import row_cache
from sparrow.kernels.block_io import BlockMap, Blocks, Layout, Ticket, remove
from sparrow.kernels.embedding_bag import Rows, Table
from sparrow.kernels.row_cache import Frames
from sparrow.kernels.row_cache.policies import policy_of

BYTES_QUEUE = 8 << 20  # of rows that wait to be written
FULL = 7 / 8  # of the frames: a checkpoint has the empty ones too, if there are no more
PIECE = 1 << 18  # rows of a checkpoint that are read at a time
SUFFIX = ".blocks"  # of the names of files
NEVER = -(2**31)  # before all batches


@dataclass(frozen=True, kw_only=True, eq=False)
class _Reading:
    """Rows that are under way to frames, for a batch."""

    batch: int
    ticket: Ticket
    rows_U: Tensor
    frames_U: Tensor


class SsdStore(Beneath):
    """Rows in a file, and frames for some of them. Frames hold whole records, so the values are
    those of memory.

    A row is in one frame at most. If it is in one, it is read, updated and saved there. A batch of
    training has all its rows in frames from `fetch` on, some batches ahead, until it is settled. A
    row finds its frame as `row_cache.admit` says, or one that stands by (`Spare`). Rows of a fixed
    number of last batches never leave. So which rows leave depends on the sequence of batches
    alone. All other lookups read rows that are out into memory of their own, and change nothing.

    Every row in a frame was in a batch, so it may have changed there, and it is written when it
    leaves. A row that was never written has its first values, which `first` computes.

    Args:
        component: whose rows these are. It says how many frames there are.
        rows: how many of its rows are here.
        dim: how many of its dimensions are here.
        placement: the folder of the file, which is there, and the device of the frames.
    """

    slots_are_rows = False
    setting = "tables.tier"  # which says how many frames there are

    def __init__(self, component: Component, rows: int, dim: int, placement: Placement) -> None:
        super().__init__()
        self.component = component
        self.rows = rows
        self.dim = dim
        self.window = placement.window
        self.settled = 0  # the last batch so that it and all before it have learnt
        self._counted = 0  # the last batch whose uses of rows are counted, if the policy counts
        self.first: First | None = None  # see `begin_with`
        self._fields = component.fields_of(dim)
        count, spare = tier_frames(component, rows)
        for name, field in self._fields.items():
            frames = empty_rows(
                *field.shape(count + spare), dtype=field.dtype, device=placement.device
            )
            # else they are zeros: checkpoints have empty frames too, and runs alike equal files
            if frames.nbytes < HUGE:
                frames.zero_()
            self.register_buffer(f"frame_{name}", frames, persistent=False)
        self.ways = count  # frames of the cache; those that stand by follow
        self.register_buffer(
            "tag", torch.full((count + spare,), -1, dtype=torch.int32), persistent=False
        )
        self.register_buffer("stamp", torch.zeros(count, dtype=torch.int32), persistent=False)
        self._policy = policy_of(component.tier.policy)
        counted = rows * self._policy.bytes_row
        self.register_buffer("counts", torch.zeros(counted, dtype=torch.uint8), persistent=False)
        self.spare = Spare(first=count, frames=spare)
        self.folder = placement.folder or Path()
        self.has_name = False
        self._layout = Layout(fields=self._fields, rows=rows)
        self._opened: Blocks | None = None
        # a file with a name that was made here, and of which no checkpoint has blocks
        self._is_needless = False
        self._maps: list[Tensor] = []  # places that are kept for a checkpoint that is being written
        self._maps_of_steps: dict[int, Tensor] = {}  # and for those that are, by step
        self._readings: deque[_Reading] = deque()
        self._evictable = 0  # the last batch whose rows may leave
        self._borrowed: dict[str, Tensor] = {}  # rows that a lookup without learning has read
        self._borrowers = torch.zeros(0, dtype=torch.int64)  # their numbers
        # different rows of batches: in frames before, all; and rows that left
        self.hits = self.used = self.left = 0

    @property
    def frames(self) -> Frames:
        """Which rows are in frames of the cache."""
        tags_F = self.get_buffer("tag")[: self.ways]
        stamps_F = self.get_buffer("stamp")
        counts_R = self.get_buffer("counts")
        return Frames(
            rows=self.rows, tags_F=tags_F, stamps_F=stamps_F, counts_R=counts_R, policy=self._policy
        )

    @property
    def _held(self) -> dict[str, Tensor]:
        return {name: self.get_buffer(f"frame_{name}") for name in self._fields}

    @property
    def levels(self) -> tuple[Rows, ...]:
        """All frames, and what was borrowed if there is something."""
        above = level_of(self.component, self._held, rows_R=self._numbers)
        if not self._borrowed:
            return (above,)
        return above, level_of(
            self.component, self._borrowed, rows_R=self._borrowers.int().to(above.touched_R.device)
        )

    # -- batches of training -----------------------------------------------------------------------

    def fetch(self, rows_N: Tensor, batch: int, settled: int) -> None:
        """Give the rows of a batch frames, and begin to read those that come in.

        Args:
            rows_N: int32 or int64 [N].
            batch: its number, above all before.
            settled: the last batch so that it and all before it have learnt, or never will.

        Raises:
            UserError: when there are too few frames for the batches under way.
        """
        self._evictable = min(batch - self.window, settled)
        counts = batch > self._counted  # else a run before this one has counted it
        self._begin(rows_N.long().unique(), batch, counts)
        self._counted = max(self._counted, batch)

    def bring(self, rows_U: Tensor, batch: int) -> None:
        """Have rows of a batch in frames that `fetch` was not told of, since they were above these.

        A batch counts as a use of rows that `fetch` was told of, and not of these. Else a resumed
        run would count some twice, which the run before had counted when it looked at the batch
        ahead.

        Args:
            rows_U: int64 [U], ascending.
            batch: its number, which may be below those that were fetched.

        Raises:
            UserError: as `fetch` does.
        """
        frames_U = self._frames_of(rows_U)
        stamps_F = self.get_buffer("stamp")
        held_V = frames_U[(frames_U >= 0) & (frames_U < self.ways)]
        before_V = stamps_F[held_V]
        self._begin(rows_U, batch, counts=False)
        stamps_F[held_V] = stamps_F[held_V].maximum(before_V)
        self.arrive()

    def _begin(self, rows_U: Tensor, batch: int, counts: bool) -> None:
        evictable = self._evictable
        self.arrive(evictable)  # of a batch that was given up
        self._evict(*self.spare.leaving(evictable))
        is_spare_U = self.spare.use(rows_U, batch)
        rows_V = rows_U[~is_spare_U]
        moves = row_cache.admit(self.frames, rows_V, batch, evictable, counts=counts)
        if counts:
            row_cache.count(self.frames, rows_U[is_spare_U])  # they are not admitted
        leaves_L = moves.old_L >= 0
        self._evict(moves.old_L[leaves_L], moves.frames_L[leaves_L])
        self._read_into(moves.rows_L, moves.frames_L, batch)
        rest_V = rows_V[moves.slots_N >= self.ways]
        self.used += len(rows_U)
        self.hits += len(rows_U) - len(moves.rows_L) - len(rest_V)
        if (free := self.spare.free) < len(rest_V):
            raise UserError(
                f"table {self.component.name!r}: {len(rest_V):,} rows of a batch find no frame, and"
                f" {free:,} frames are left beside those of the batches before; raise"
                f" {self.setting}.fraction or bytes, or lower data.batch_size or loop.accumulate"
            )
        if len(rest_V):
            self._read_into(rest_V, self._stand_by(rest_V, batch), batch)

    def arrive(self, last: int | None = None) -> None:
        """Wait for the rows of all batches, or of those up to one. Those that were never written
        begin.
        """
        while self._readings and (last is None or self._readings[0].batch <= last):
            reading = self._readings.popleft()
            never_U = self._blocks.wait(reading.ticket)
            if never_U.any():
                put_into(
                    self._held, reading.frames_U[never_U], self._first(reading.rows_U[never_U])
                )

    def admit(self, rows_N: Tensor, table: Table) -> Tensor:
        """Returns the slots of rows that are to learn. The batch was fetched."""
        return self.pinned(rows_N)

    def pinned(self, rows_N: Tensor) -> Tensor:
        """Returns the slots of rows that are to learn.

        Raises:
            UserError: when one is in no frame.
        """
        slots_N = self._frames_of(rows_N)
        if (slots_N < 0).any():
            remedy = "look them up in training mode, not in eval, and once for each update"
            raise UserError(
                f"table {self.component.name!r}: rows are to learn that no batch of training has;"
                f" {remedy}"
            )
        return slots_N

    def begin_with(self, first: First) -> None:
        """Have a row that was never written begin so."""
        self.first = first

    def settle(self) -> None:
        """Do nothing: `fetch` is told."""

    @property
    def settled_to(self) -> int:
        """The last batch so that it and all before it have learnt."""
        return self.settled

    def settle_to(self, batch: int) -> None:
        """Hear that a batch and all before it have learnt, or never will."""
        self.settled = batch

    @property
    @override
    def transit(self) -> Callable[[Mapping[int, Any]], InTransit] | None:
        return Flights

    # -- other lookups -----------------------------------------------------------------------------

    def slots_of(self, rows_N: Tensor) -> Tensor:
        """Returns the slots of rows, of which those that are out are borrowed until the next
        call.
        """
        slots_N = self._frames_of(rows_N)
        out_N = slots_N < 0
        self._borrowed = {}
        if out_N.any():
            rows_U, place_V = rows_N[out_N].long().unique(return_inverse=True)
            device = self._held["touched"].device
            self._borrowed = {name: values.to(device) for name, values in self.read(rows_U).items()}
            self._borrowers = rows_U
            slots_N[out_N] = len(self._held["touched"]) + place_V
        return slots_N

    def give_back(self) -> None:
        """Forget what was borrowed."""
        self._borrowed = {}

    @contextmanager
    def overwritten(self, rows_U: Tensor) -> Iterator[Tensor]:
        """Rows have slots [U] in this context, to which whole records are written. Rows that are in
        no frame wait after that until blocks are written.

        None of them is under way to a frame.
        """
        slots_U = self._frames_of(rows_U)
        out_V = (slots_U < 0).nonzero()[:, 0]
        if not len(out_V):
            yield slots_U
            return
        self._borrowers = rows_U[out_V]
        self._borrowed = empty(self._fields, len(out_V), self._held["touched"].device)
        slots_U[out_V] = len(self._held["touched"]) + torch.arange(len(out_V))
        yield slots_U
        self._put(self._borrowers, self._borrowed)
        self._borrowed = {}

    # -- rows by number ----------------------------------------------------------------------------

    def read(self, at: At) -> dict[str, Tensor]:
        """Returns all fields of some rows, as copies in the memory of the host. A checkpoint may
        hold all rows.
        """
        self.arrive()
        rows_U = _rows_of(at, self.rows)
        records = empty(self._fields, len(rows_U))
        frames_U = self._frames_of(rows_U)
        held_V = (frames_U >= 0).nonzero()[:, 0]
        out_V, rows_V = _ascending(rows_U, frames_U < 0)
        never_V = self._blocks.wait(self._blocks.fetch(rows_V, records, out_V))
        if never_V.any():
            put_into(records, out_V[never_V], self._first(rows_V[never_V]))
        put_into(records, held_V, take_rows(self._held, frames_U[held_V]))
        return records

    @override
    def in_order(self) -> InOrder:
        """Returns what reads slices of rows in less time than `read`, until something changes."""
        self.arrive()
        tags_F, (rows_S, frames_S, _) = self.frames.tags_F, self.spare.held
        frames_H = (tags_F >= 0).nonzero()[:, 0]
        rows_H, order_H = torch.cat([tags_F[frames_H].long(), rows_S]).sort()
        return InOrder(
            self._blocks, self._first, rows_H, torch.cat([frames_H, frames_S])[order_H], self._held
        )

    @torch.no_grad()
    def write(self, at: At, fields: Mapping[str, Tensor], columns: slice = slice(None)) -> None:
        """Overwrite some fields of some rows. Rows that never learnt are written only if that
        changes them.
        """
        rows_U = _rows_of(at, self.rows)
        values = {
            name: value.expand(len(rows_U), *value.shape[1:]) for name, value in fields.items()
        }
        if values.keys() == self._fields.keys() and columns.indices(self.dim) == (0, self.dim, 1):
            new = values
            asks_U = (values["touched"] == 0).cpu()
        else:
            new = self.read(rows_U)
            asks_U = torch.zeros(len(rows_U), dtype=torch.bool)
            for name, value in values.items():
                self._fields[name].put(new[name], slice(None), value, columns, self.dim)
        self.arrive()
        frames_U = self._frames_of(rows_U)
        is_in_U = frames_U >= 0
        put_into(self._held, frames_U[is_in_U], take_rows(new, is_in_U))
        puts_U = ~is_in_U
        if (asks_U := asks_U & puts_U).any():
            puts_U[asks_U] = ~_equal(self.read(rows_U[asks_U]), take_rows(new, asks_U))
        if puts_U.any():
            records = {
                name: entries.to(self._fields[name].dtype)
                for name, entries in take_rows(new, puts_U).items()
            }
            self._put(rows_U[puts_U], records)

    def put(self, rows_U: Tensor, fields: Mapping[str, Tensor]) -> None:
        """Take whole records of rows of which none is under way to a frame. rows_U: int64 [U], each
        once.
        """
        frames_U = self._frames_of(rows_U)
        is_in_U = frames_U >= 0
        put_into(self._held, frames_U[is_in_U], take_rows(fields, is_in_U))
        self._put(rows_U[~is_in_U], take_rows(fields, ~is_in_U))

    @property
    def counters(self) -> dict[str, int]:
        """What was read and written so far, see `Blocks.counters`, and different rows of
        batches.
        """
        return {**self._blocks.counters, "hits": self.hits, "used": self.used, "left": self.left}

    def close(self) -> None:
        """Let go of the file. It goes away if no checkpoint has blocks of it. Nothing is read or
        written after that.
        """
        if self._opened:
            self._opened.close()
            if self._is_needless:
                remove(self._opened.file.path)
        self.has_name = False

    # -- checkpoints -------------------------------------------------------------------------------

    def name_file(self, folder: Path) -> None:
        """Have the file under a name in a folder, so that a checkpoint can be of its blocks.
        Nothing was written yet.

        The file is made with the first row that is written, or by `go_on`.
        """
        assert self.left == 0
        self.close()
        self._opened = None
        self.folder = make_folder(folder)
        self.has_name = True

    def save(self, *, seed: int, rows: tuple[int, int], columns: tuple[int, int]) -> Saved:
        """Returns what a checkpoint needs of all rows as they are now. Its blocks are kept, see
        `keep_only`.

        The blocks are on the disk. The newer rows are those of frames, and those that wait to be
        written. `Saved.field` reads them until the next batch.

        Raises:
            UserError: when the disk fails.
        """
        self.arrive()
        map, rows_Q, fields_Q = self._blocks.snapshot()
        # from now on: an end between here and `keep_only` may leave a checkpoint of it
        self._is_needless = False
        self._maps.append(map.places_K)
        # of the others the frame is newer
        waiting_W = (self._frames_of(rows_Q) < 0).nonzero()[:, 0]
        _, frames_S, batches_S = self.spare.held
        tags_F = self.frames.tags_F
        settled = self.settled
        is_used_F = tags_F >= 0
        used = int(is_used_F.count_nonzero())
        # Frames are written as they lie, because gathering takes longer, unless many of them are
        # empty.
        at_R = None if used >= FULL * len(tags_F) else is_used_F.nonzero()[:, 0]
        parts = {
            name: [(values, at_R), (values, frames_S), (fields_Q[name][waiting_W], None)]
            for name, values in self._held.items()
        }
        parts[ROW] = [
            (self._numbers, at_R),
            (self._numbers, frames_S),
            (rows_Q[waiting_W].int(), None),
        ]
        parts[AGE] = [(self.get_buffer("stamp"), at_R), (batches_S.int(), None)]
        counts = (len(tags_F) if at_R is None else used, len(frames_S), len(waiting_W))
        bounds = (0, counts[0], counts[0] + counts[1], sum(counts))

        def field(name: str, first: int, last: int) -> Tensor:
            pieces = []
            start = 0
            # rows that wait have no age
            for (values, at), count in zip(parts[name], counts, strict=False):
                low = max(first - start, 0)
                high = min(last - start, count)
                if low < high or first == last == start:
                    if at is None:
                        pieces.append(values[low:high])
                    else:
                        pieces.append(values.index_select(0, at[low:high]))
                start += count
            joined = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
            return settled - joined if name == AGE else joined

        return Saved(
            path=self._blocks.file.path, map=map, bounds=bounds, field=field,
            counts_R=self.get_buffer("counts"), batches=(self.settled, self._counted),
            component=self.component, seed=seed, rows=rows, columns=columns,
        )  # fmt: skip

    @override
    def external(
        self, seed: int, rows: tuple[int, int], columns: tuple[int, int]
    ) -> External | None:
        return self.save(seed=seed, rows=rows, columns=columns) if self.has_name else None

    @override
    def adopt(self, part: External, learns: bool) -> bool:
        """Rows that learn go on only in a file that lies where their own would."""
        assert isinstance(part, Saved)
        if not learns:
            return self.show(part)
        if not self.has_name or self.folder != part.path.parent:
            return False
        self.go_on(part, part.find_maps())
        return True

    def go_on(self, saved: Saved, maps: Mapping[int, BlockMap]) -> None:
        """Go on with the rows of a checkpoint and with its file. Nothing but what has no frame here
        is written again.

        With as many frames as there the same rows leave as if nothing had been between.

        Args:
            saved: what it has. The file is in this store's folder.
            maps: the maps of all checkpoints that have blocks of this file, this one's too, by
                step.

        Raises:
            UserError: when the file is missing, cut, another one or in use.
        """
        assert self._opened is None and self.has_name
        self._opened = self._open(saved.path, saved.map)
        for step, map in maps.items():
            self._opened.keep(map)
            self._maps_of_steps[step] = map.places_K
        self.settled, self._counted = saved.batches
        for rows_V, fields in self._put_in_frames(saved):
            self._put(rows_V, fields)
        counts_R = self.get_buffer("counts")
        if len(saved.counts_R) == len(counts_R):  # else one of the policies does not count
            counts_R.copy_(saved.counts_R.clamp(max=self._policy.most))

    def show(self, saved: Saved) -> bool:
        """Have the rows of a checkpoint where they lie, to be read. Another process may train with
        the file.

        Returns whether all newer rows found frames. If not, nothing was done.

        Args:
            saved: see `go_on`.

        Raises:
            UserError: when the file is missing, cut or another one.
        """
        assert self._opened is None
        if any(len(rows_V) for rows_V, _ in self._put_in_frames(saved, also_waiting=True)):
            self.get_buffer("tag").fill_(-1)
            self.spare = Spare(first=self.ways, frames=self.spare.free + len(self.spare.rows_H))
            return False
        self._opened = self._open(saved.path, saved.map, is_written=False)
        return True

    def _put_in_frames(
        self, saved: Saved, also_waiting: bool = False
    ) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        """Gives frames to the newer rows of a checkpoint. Yields those that find none, in pieces.

        also_waiting: whether rows that waited to be written take frames that stand by.
        """
        for place, (begin, end) in enumerate(itertools.pairwise(saved.bounds)):
            for first in range(begin, end, PIECE):
                last = min(first + PIECE, end)
                rows_V = saved.field(ROW, first, last).long()
                ages_V = saved.field(AGE, first, last) if place < 2 else rows_V[:0]
                fields = saved.fields(first, last)
                if (is_empty_V := rows_V < 0).any():
                    rows_V = rows_V[~is_empty_V]
                    ages_V = ages_V[~is_empty_V]
                    fields = take_rows(fields, ~is_empty_V)
                frames_V = self._frames_for(rows_V, ages_V, 1 if also_waiting and place else place)
                fits_V = frames_V >= 0
                put_into(self._held, frames_V[fits_V], take_rows(fields, fits_V))
                yield rows_V[~fits_V], take_rows(fields, ~fits_V)

    def _frames_for(self, rows_V: Tensor, ages_V: Tensor, place: int) -> Tensor:
        """Returns frames for rows of a checkpoint, -1 where there are none.

        place: 0 for rows that were in the cache, 1 for rows in frames that stood by, 2 for rows
        that waited.
        """
        frames_V = torch.full_like(rows_V, -1)
        if place == 0:
            slots_V = row_cache.admit(self.frames, rows_V, -1, NEVER).slots_N  # if one is free
            is_in_V = slots_V < self.ways
            self.get_buffer("stamp")[slots_V[is_in_V]] = self.settled - ages_V[is_in_V]
            return torch.where(is_in_V, slots_V, -1)
        if place == 1:
            count = min(len(rows_V), self.spare.free)
            is_aged = len(ages_V) > 0  # rows that waited have no age
            frames_V[:count] = self._stand_by(
                rows_V[:count], self.settled - ages_V[:count] if is_aged else 0
            )
        return frames_V

    def keep_only(self, steps: Container[int], step: int) -> None:
        """Hear which checkpoints there are, and that the blocks which `save` kept last are of one
        of them.

        Args:
            steps: all checkpoints.
            step: the one.
        """
        written = self._maps
        self._maps = []
        doomed = [
            self._maps_of_steps.pop(saved_step)
            for saved_step in list(self._maps_of_steps)
            if saved_step not in steps or (written and saved_step == step)
        ]
        for places_K in (*written[:-1], *doomed):
            self._blocks.drop(places_K)
        if written:
            self._maps_of_steps[step] = written[-1]

    # -- inside ------------------------------------------------------------------------------------

    @property
    def _blocks(self) -> Blocks:
        """The file. Without a name it goes away with the process, however this ends."""
        if self._opened is None:
            path = (
                self.folder
                / f"{quote(self.component.name, safe='')}.{secrets.token_hex(8)}{SUFFIX}"
            )
            self._opened = self._open(path, None)
            self._is_needless = self.has_name
            if not self.has_name:
                os.unlink(path)
        return self._opened

    def _open(self, path: Path, map: BlockMap | None, is_written: bool = True) -> Blocks:
        queue = queue_bytes(self.component, self.rows)
        table = self.component.name
        return Blocks(
            path, self._layout, table=table, map=map, bytes_queue=queue, is_written=is_written
        )

    def _first(self, at: At) -> dict[str, Tensor]:
        assert self.first is not None
        return self.first(at)

    @property
    def _numbers(self) -> Tensor:
        """Which row is in each frame, where kernels read it."""
        return self.get_buffer("tag")

    def _frames_of(self, rows_N: Tensor) -> Tensor:
        """Returns the frame of each row, or -1."""
        slots_N = row_cache.slots_of(self.frames, rows_N)
        out_N = slots_N >= self.ways
        if out_N.any():
            slots_N[out_N] = self.spare.find(rows_N[out_N].long())
        return slots_N

    def _stand_by(self, rows_U: Tensor, batches: Tensor | int) -> Tensor:
        """Returns frames that stand by, which rows have now."""
        frames_U = self.spare.take(rows_U, batches)
        self.get_buffer("tag")[frames_U] = rows_U.int()
        return frames_U

    def _evict(self, rows_U: Tensor, frames_U: Tensor) -> None:
        if len(rows_U):
            self.left += len(rows_U)
            self._put(rows_U, take_rows(self._held, frames_U))

    def _put(self, rows_U: Tensor, fields: Mapping[str, Tensor]) -> None:
        """Have rows written, as many at a time as the queue holds: it would keep memory for
        more.
        """
        step = max(1, queue_bytes(self.component, self.rows) // self._layout.record_bytes)
        for first in range(0, len(rows_U), step):
            part = slice(first, first + step)
            self._blocks.put(rows_U[part], take_rows(fields, part))

    def _read_into(self, rows_U: Tensor, frames_U: Tensor, batch: int) -> None:
        if len(rows_U):
            rows_U, order_U = rows_U.sort()
            frames_U = frames_U[order_U]
            ticket = self._blocks.fetch(rows_U, self._held, frames_U)
            self._readings.append(
                _Reading(batch=batch, ticket=ticket, rows_U=rows_U, frames_U=frames_U)
            )


def queue_bytes(component: Component, rows: int) -> int:
    """Returns how many bytes of a part of a component with so many rows may wait to be written."""
    return min(BYTES_QUEUE, tier_frames(component, rows)[0] * component.bytes_row)


def _rows_of(at: At, rows: int) -> Tensor:
    return torch.arange(*at.indices(rows)) if isinstance(at, slice) else at.long().cpu()


def _ascending(rows_U: Tensor, chosen_U: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the places and the numbers of some of the rows, in the order of the rows."""
    at_V = chosen_U.nonzero()[:, 0]
    rows_V, order_V = rows_U[at_V].sort()
    return at_V[order_V], rows_V


def _equal(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> Tensor:
    """Returns for each row whether all its bytes are the same, bool [U]."""
    same_U = torch.ones(len(first["touched"]), dtype=torch.bool)
    for name, values in first.items():
        pair = [
            x.cpu().contiguous().view(len(same_U), -1).view(torch.uint8)
            for x in (values, second[name].to(values))
        ]
        same_U &= (pair[0] == pair[1]).all(1)
    return same_U
