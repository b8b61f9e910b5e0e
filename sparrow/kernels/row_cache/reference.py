"""The definition, a row at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from sparrow.kernels.row_cache import Frames, Moves


def admit(frames: Frames, rows_N: Tensor, batch: int, evictable: int) -> Moves:
    """See the package."""
    from sparrow.kernels.row_cache import WAYS, Moves, count  # which imports this file

    rows_U = rows_N.long().unique()
    tags = frames.tags_F.tolist()
    stamps = frames.stamps_F.tolist()
    policy = frames.policy
    count(frames, rows_U)
    place = {row: frame for frame, row in enumerate(tags) if row >= 0}
    missing = []
    for row in rows_U.tolist():
        if row in place:
            stamps[place[row]] = batch
        else:
            missing.append(row)

    def uses(row: int) -> int:
        return int(frames.counts_R[row]) if policy.most else 0

    moves = []
    set_numbers = frames.sets_of(torch.tensor(missing, dtype=torch.int64)).tolist()
    for row, set_number in zip(missing, set_numbers, strict=True):
        ways = range(set_number * WAYS, (set_number + 1) * WAYS)
        free = [frame for frame in ways if tags[frame] < 0]
        may_leave = [frame for frame in ways if stamps[frame] <= evictable]
        if free:
            frame = free[0]
        elif may_leave:
            frame = min(
                may_leave, key=lambda f: (uses(tags[f]) * policy.by_count, stamps[f], tags[f])
            )
            if policy.is_strict and uses(row) <= uses(tags[frame]):
                continue
        else:
            continue
        moves.append((frame, row, tags[frame]))
        tags[frame], stamps[frame] = row, batch
    frames.tags_F.copy_(torch.tensor(tags))
    frames.stamps_F.copy_(torch.tensor(stamps))
    frames_L, rows_L, old_L = torch.tensor(moves, dtype=torch.int64).view(-1, 3).T.contiguous()
    hits = len(rows_U) - len(missing)
    slots_N = slots_of(frames, rows_N)
    return Moves(
        frames_L=frames_L,
        rows_L=rows_L,
        old_L=old_L,
        hits=hits,
        unique=len(rows_U),
        slots_N=slots_N,
    )


def slots_of(frames: Frames, rows_N: Tensor) -> Tensor:
    """See the package."""
    from sparrow.kernels.row_cache import WAYS  # which imports this file

    rows_N = rows_N.long()
    ways_NW = frames.sets_of(rows_N)[:, None] * WAYS + torch.arange(WAYS, device=rows_N.device)
    is_in_NW = frames.tags_F[ways_NW] == rows_N[:, None]
    return torch.where(is_in_NW.any(1), (ways_NW * is_in_NW).sum(1), len(frames.tags_F) + rows_N)
