"""`CachedRows`: rows of a table on an SSD, some of which are in memory too."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sparrow.core.errors import UserError
from sparrow.core.pages import empty_rows
from sparrow.embeddings.spec import TAG_BYTES
from sparrow.kernels import row_cache
from sparrow.kernels.block_io import Blocks, Ticket
from sparrow.kernels.row_cache import WAYS, Frames
from sparrow.serving.ssd.blocks import UnreadableError, mended

_LAST = (1 << 31) - 2  # the highest number of a batch
_STEP = 1 << 14  # rows that are read at a time to warm a cache


@dataclass(frozen=True, kw_only=True, eq=False)
class Fetch:
    """Rows on their way into memory of a request's own.

    rows_U: int64, ascending. fields: field -> its entries there [U, ...], all of them once `CachedRows.end` has
    returned. ticket: of those that have to be read, if any.
    """

    rows_U: Tensor
    fields: dict[str, Tensor]
    ticket: Ticket | None


class CachedRows:
    """Rows that are read from blocks, with a cache of those that were used last. Threads may share it.

    A request gets copies. So no other can take a frame away from it, and locks are held for copies in memory only.

    Args:
        blocks: the rows. They are closed with it.
        table: the name of their table.
        place: their folder.
        bytes: of the cache; one set of frames is the least.
    """

    def __init__(self, blocks: Blocks, table: str, place: Path, bytes: int) -> None:
        self.blocks, self.table, self.place, self.rows = blocks, table, place, blocks.layout.rows
        sets = int(bytes) // (WAYS * (blocks.layout.record_bytes + TAG_BYTES))
        count = WAYS * max(1, min(sets, -(-self.rows // WAYS)))
        fields = blocks.layout.fields
        self._held = {name: empty_rows(*field.shape(count), dtype=field.dtype) for name, field in fields.items()}
        self.frames = Frames(
            rows=self.rows,
            tags_F=torch.full((count,), -1, dtype=torch.int32),
            stamps_F=torch.zeros(count, dtype=torch.int32),
            counts_R=torch.zeros(0, dtype=torch.uint8),
        )
        self.hits = self.misses = 0
        self.lock_s = 0.0  # that threads have waited for each other
        self._batch = 0
        self._lock = threading.Lock()
        self._reads = threading.Lock() if blocks.way == "reference" else nullcontext()  # the others take threads
        weakref.finalize(self, blocks.close)

    def begin(self, rows_U: Tensor) -> Fetch:
        """Begin to get rows. Those that are not in memory are read from now on.

        Args:
            rows_U: int64 [U], ascending, each once.
        """
        shapes = self.blocks.layout.fields.items()
        fields = {name: torch.zeros(field.shape(len(rows_U)), dtype=field.dtype) for name, field in shapes}
        with self._locked():
            slots_U = row_cache.slots_of(self.frames, rows_U)
            is_in_U = slots_U < len(self.frames.tags_F)
            in_H = is_in_U.nonzero()[:, 0]
            for name, of in fields.items():
                of[in_H] = self._held[name][slots_U[in_H]]
            self.hits += len(in_H)
            self.misses += len(rows_U) - len(in_H)
        if len(in_H) == len(rows_U):
            return Fetch(rows_U=rows_U, fields=fields, ticket=None)
        out_M = (~is_in_U).nonzero()[:, 0]
        with self._reads:
            return Fetch(rows_U=rows_U, fields=fields, ticket=self.blocks.fetch(rows_U[out_M], fields, out_M))

    def end(self, fetch: Fetch) -> None:
        """Wait for rows, which are in the cache then. A row that was not written is one of zeros.

        Raises:
            UnreadableError: when a block cannot be read, or is not what was written.
        """
        if fetch.ticket is not None:
            try:
                with self._reads:
                    self.blocks.wait(fetch.ticket)
            except UserError as error:
                raise UnreadableError(mended(error, self.place)) from None
        self._admit(fetch.rows_U, fetch.fields)

    def warm(self, rows_H: Tensor) -> None:
        """Read rows into the cache, in the order of their blocks.

        Args:
            rows_H: int64, the one that is used most first. As many as there are frames are read.

        Raises:
            UnreadableError: see `end`.
        """
        first = rows_H[: len(self.frames.tags_F)]
        for rows_U in first[first < self.rows].unique().split(_STEP):
            self.end(self.begin(rows_U))

    @property
    def counters(self) -> Mapping[str, int]:
        """So far: rows that were in memory when a request asked and that were not, and blocks that were read."""
        return {"hits": self.hits, "misses": self.misses, "reads": self.blocks.counters["blocks_read"]}

    def _admit(self, rows_U: Tensor, fields: Mapping[str, Tensor]) -> None:
        with self._locked():
            if self._batch == _LAST:  # which rows were used last is forgotten
                self.frames.stamps_F.zero_()
                self._batch = 0
            self._batch += 1
            moves = row_cache.admit(self.frames, rows_U, self._batch, self._batch - 1)
            if len(moves.rows_L):
                at_L = torch.searchsorted(rows_U, moves.rows_L)
                for name, of in self._held.items():
                    of[moves.frames_L] = fields[name][at_L]

    @contextmanager
    def _locked(self) -> Iterator[None]:
        if not self._lock.acquire(blocking=False):
            begun = time.perf_counter()
            self._lock.acquire()
            self.lock_s += time.perf_counter() - begun
        try:
            yield
        finally:
            self._lock.release()
