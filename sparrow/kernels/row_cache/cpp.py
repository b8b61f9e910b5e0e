"""The compiled operators with the signatures of the reference."""

from __future__ import annotations

import torch
from torch import Tensor

from sparrow.kernels import missing
from sparrow.kernels.row_cache import Frames, Moves

assert not missing(), "`resolve` comes first"
ops = torch.ops.sparrow


def admit(frames: Frames, rows_N: Tensor, batch: int, evictable: int) -> Moves:
    """See the package."""
    known = (frames.tags_F, frames.stamps_F, frames.counts_R, rows_N.contiguous())
    policy = (frames.policy.most, frames.policy.by_count, frames.policy.is_strict)
    frames_L, rows_L, old_L, slots_N, counts_2 = ops.row_cache_admit(
        *known, frames.rows, frames.multiplier, batch, evictable, *policy
    )
    hits, unique = counts_2.tolist()
    return Moves(
        frames_L=frames_L, rows_L=rows_L, old_L=old_L, hits=hits, unique=unique, slots_N=slots_N
    )


def slots_of(frames: Frames, rows_N: Tensor) -> Tensor:
    """See the package."""
    slots_N: Tensor = ops.row_cache_slots(
        frames.tags_F, rows_N.contiguous(), frames.rows, frames.multiplier
    )
    return slots_N
