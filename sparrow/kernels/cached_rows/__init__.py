"""Rows of a table on a disk that are only read, and a cache of some in memory.

`get` gives copies. So a request keeps its rows while others take frames from each other, and locks are held for copies
in memory only, never while a disk is awaited. What tables miss is read at the same time: through io_uring by the thread
that waits, in a ring of its own.

A row that was read enters the cache in the place of the row of its set that was used least recently, unless all were
used since the call began.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from sparrow.core.errors import UserError
from sparrow.core.pages import empty_rows
from sparrow.kernels.block_io import Blocks
from sparrow.kernels.cached_rows import reference
from sparrow.kernels.row_cache import WAYS, Frames

LAST = (1 << 31) - 2  # the highest number of a call; then numbers begin again
BATCH, HITS, MISSES, WAITED = range(4)


@dataclass(frozen=True, kw_only=True, eq=False)
class Cached:
    """A table's rows. Threads may share it.

    Args:
        blocks: all of them. Nobody writes there, and they stay open as long as this is used.
        frames: which rows are in memory.
        held: field -> its entries in the frames, [F, ...].
        counts_4: int64, the number of the last call, lookups that were in memory and that were not, nanoseconds that
            threads have waited for each other.
        last: the highest number of a call.
        lock: of the reference.
        handle: of the compiled operators; 0 for the reference.
    """

    blocks: Blocks
    frames: Frames
    held: Mapping[str, Tensor]
    counts_4: Tensor
    last: int
    lock: Any = field(default_factory=Lock)
    handle: int = 0


def cached(blocks: Blocks, sets: int, last: int = LAST) -> Cached:
    """Returns rows with an empty cache.

    Args:
        blocks: the rows.
        sets: of `WAYS` frames each, at least one.
        last: the highest number of a call.
    """
    rows, fields, count = blocks.layout.rows, blocks.layout.fields, WAYS * sets
    frames = Frames(
        rows=rows,
        tags_F=empty_rows(count, dtype=torch.int32).fill_(-1),
        stamps_F=empty_rows(count, dtype=torch.int32).zero_(),
        counts_R=torch.zeros(0, dtype=torch.uint8),
    )
    held = {name: empty_rows(*of.shape(count), dtype=of.dtype) for name, of in fields.items()}
    counts_4, handle = torch.zeros(4, dtype=torch.int64), 0
    if blocks.way != "reference":
        from sparrow.kernels.cached_rows import cpp  # can be imported only once the library is loaded

        handle = cpp.opened(blocks, frames, held, counts_4, (rows, frames.multiplier, last))
    made = Cached(blocks=blocks, frames=frames, held=held, counts_4=counts_4, last=last, handle=handle)
    if handle:
        weakref.finalize(made, cpp.close, handle)
    return made


def get(asked: Sequence[tuple[Cached, Tensor]]) -> list[tuple[dict[str, Tensor], UserError | None]]:
    """Returns for each table (fields, error): field -> its entries in the rows, [N, ...], and why they are not right.

    A row that was never written, and one outside the table, is of zeros.

    Args:
        asked: tables, each once, and int64 [N] of rows in any order.
    """
    if any(of.handle for of, _ in asked):
        from sparrow.kernels.cached_rows import cpp

        return cpp.get(asked)
    return reference.get(asked)


__all__ = ["LAST", "Cached", "cached", "get"]
