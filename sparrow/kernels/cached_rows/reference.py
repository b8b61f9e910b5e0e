"""The definition: one table after another, a call at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparrow.core.errors import UserError
from sparrow.kernels import row_cache
from sparrow.kernels.block_io import Layout

if TYPE_CHECKING:
    from sparrow.kernels.cached_rows import Cached


@dataclass(frozen=True, eq=False)
class Held:
    """Frames, and a record in each: field -> [F, ...]."""

    frames: row_cache.Frames
    fields: dict[str, Tensor]

    @classmethod
    def empty(cls, layout: Layout, count: int) -> Held:
        """Returns so many, without rows."""
        frames = row_cache.Frames(
            rows=layout.rows,
            tags_F=torch.full((count,), -1, dtype=torch.int32),
            stamps_F=torch.zeros(count, dtype=torch.int32),
            counts_R=torch.zeros(0, dtype=torch.uint8),
        )
        fields = {
            name: torch.zeros(kind.shape(count), dtype=kind.dtype)
            for name, kind in layout.fields.items()
        }
        return cls(frames, fields)


def get(
    requests: Sequence[tuple[Cached, Tensor]],
) -> list[tuple[dict[str, Tensor], UserError | None]]:
    """See the package."""
    answers = []
    for cached, rows_N in requests:
        with cached.lock:
            answers.append(_get(cached, rows_N))
    return answers


def _get(cached: Cached, rows_N: Tensor) -> tuple[dict[str, Tensor], UserError | None]:
    from sparrow.kernels.cached_rows import BATCH, HITS, MISSES  # which imports this file

    assert isinstance(cached.state, Held), "it is the compiled operators'"
    frames, held, counts_4 = cached.state.frames, cached.state.fields, cached.counts_4
    if counts_4[BATCH] >= cached.last:  # which rows were used last is forgotten
        frames.stamps_F.zero_()
        counts_4[BATCH] = 0
    counts_4[BATCH] += 1
    batch = int(counts_4[BATCH])
    is_row_N = (rows_N >= 0) & (rows_N < frames.rows)
    rows_U, place_M, count_U = rows_N[is_row_N].unique(return_inverse=True, return_counts=True)
    fields_U = {
        name: torch.zeros(field.shape(len(rows_U)), dtype=field.dtype)
        for name, field in cached.blocks.layout.fields.items()
    }
    slots_U = row_cache.slots_of(frames, rows_U, impl="reference")
    is_in_U = slots_U < len(frames.tags_F)
    counts_4[HITS] += count_U[is_in_U].sum()
    counts_4[MISSES] += count_U[~is_in_U].sum()
    frames.stamps_F[slots_U[is_in_U]] = batch
    for name, entries in fields_U.items():
        entries[is_in_U] = held[name][slots_U[is_in_U]]
    read_V, at_V = rows_U[~is_in_U], (~is_in_U).nonzero()[:, 0]
    error = None
    if len(read_V):
        try:
            cached.blocks.wait(cached.blocks.fetch(read_V, fields_U, at_V))
        except UserError as failure:
            error = failure
        else:
            moves = row_cache.admit(frames, read_V, batch, batch - 1, impl="reference")
            at_L = torch.searchsorted(rows_U, moves.rows_L.contiguous())
            for name, entries in held.items():
                entries[moves.frames_L] = fields_U[name][at_L]
    fields = {
        name: entries.new_zeros(len(rows_N), *entries.shape[1:])
        for name, entries in fields_U.items()
    }
    for name, entries in fields.items():
        entries[is_row_N] = fields_U[name][place_M]
    return fields, error
