"""Rows of a table on a disk that are only read, and a cache of some in memory.

`get` gives copies. So a request keeps its rows while others take frames from each other, and locks
are held for copies in memory only, never while a disk is awaited. What tables miss is read at the
same time: through io_uring by the thread that waits, in a ring of its own.

A row that was read enters the cache in the place of the row of its set that was used least
recently, unless all were used since the call began.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from sparrow.core.errors import UserError
from sparrow.core.pages import empty_rows
from sparrow.core.shared import shared_memory
from sparrow.kernels import close
from sparrow.kernels.block_io import Blocks
from sparrow.kernels.cached_rows import reference
from sparrow.kernels.cached_rows.reference import Held
from sparrow.kernels.row_cache import WAYS

LAST = (1 << 31) - 2  # the highest number of a call; then numbers begin again
LINE = 64  # bytes that a processor reads at a time
HEAD = 32  # words before the first set: a lock, and the number of the last call
BATCH, HITS, MISSES, WAITED = range(4)


@dataclass(frozen=True, kw_only=True, eq=False)
class Cached:
    """A table's rows. Threads may share it.

    Args:
        blocks: all of them. Nobody writes there, and they stay open as long as this is used.
        count: F, how many frames there are.
        counts_4: int64, the number of the last call, lookups that were in memory and that were not,
            nanoseconds that threads have waited for each other.
        last: the highest number of a call.
        state: what the compiled operators know: their handle and their memory, int32 [HEAD + sets x
            words]; or the reference.
        lock: of the reference.
    """

    blocks: Blocks
    count: int
    counts_4: Tensor
    last: int
    state: tuple[int, Tensor] | Held
    lock: Any = field(default_factory=Lock)

    @property
    def rows_F(self) -> Tensor:
        """The row in each frame, int32, -1 for none."""
        return (
            self.state.frames.tags_F
            if isinstance(self.state, Held)
            else self._sets[:, :WAYS].flatten()
        )

    @property
    def stamps_F(self) -> Tensor:
        """The number of the last call that used each frame, int32."""
        return (
            self.state.frames.stamps_F
            if isinstance(self.state, Held)
            else self._sets[:, WAYS : 2 * WAYS].flatten()
        )

    @property
    def _sets(self) -> Tensor:
        assert isinstance(self.state, tuple)
        return self.state[1][HEAD:].view(self.count // WAYS, -1)


def cached(blocks: Blocks, sets: int, last: int = LAST, shared: Path | None = None) -> Cached:
    """Returns rows with an empty cache, or with that of other processes.

    Args:
        blocks: the rows.
        sets: of `WAYS` frames each, at least one.
        last: the highest number of a call.
        shared: the file in memory of a cache that processes share, see `shared_memory`. All have
            the same blocks, and as many sets. One that is killed while it writes there costs the
            others what the cache holds. The reference shares nothing.

    Raises:
        OSError: when there is no room for a cache that is shared.
    """
    counts_4 = torch.zeros(4, dtype=torch.int64)
    layout = blocks.layout
    held = Held.empty(layout, WAYS * (sets if blocks.way == "reference" else 1))
    cache = Cached(blocks=blocks, count=WAYS * sets, counts_4=counts_4, last=last, state=held)
    if blocks.way == "reference":
        return cache
    from sparrow.kernels.cached_rows import cpp  # can be imported only once the library is loaded

    words = -(-WAYS * (8 + layout.record_bytes) // LINE) * LINE // 4
    handles = list[int]()

    def begin(memory_W: Tensor, is_new: bool) -> None:
        settings = (layout.rows, held.frames.multiplier, last, sets, is_new)
        handles.append(cpp.open_cache(blocks, memory_W, counts_4, settings))

    size = HEAD + sets * words
    if shared is None:
        begin(memory_W := empty_rows(size, dtype=torch.int32), True)
    else:
        memory_W = shared_memory(shared, size, begin)
    cache = replace(cache, state=(handles[0], memory_W))
    weakref.finalize(cache, close, cpp.ops.cached_rows_close, handles[0])
    return cache


def get(
    requests: Sequence[tuple[Cached, Tensor]],
) -> list[tuple[dict[str, Tensor], UserError | None]]:
    """Returns for each table (fields, error): field -> its entries in the rows, [N, ...], and why
    they are not right.

    A row that was never written, and one outside the table, is of zeros.

    Args:
        requests: tables, each once, and int64 [N] of rows in any order.
    """
    if any(not isinstance(rows.state, Held) for rows, _ in requests):
        from sparrow.kernels.cached_rows import cpp  # as above

        return cpp.get(requests)
    return reference.get(requests)


__all__ = ["LAST", "Cached", "cached", "get"]
