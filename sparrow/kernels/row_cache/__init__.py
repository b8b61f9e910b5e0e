"""Which rows of a table are in a set-associative cache, and which rows enter and leave with a
batch.

The cache knows row numbers alone; its owner copies the records. impl: see `sparrow.kernels`. Sets
have 32 ways (FBGEMM; arXiv 2010.11305, section 3). Row r belongs to set (r * a mod R) mod S, where
a is prime to R. So every set has the same number of rows, one more or less. Hashing would overflow
some sets even with a frame for each row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sparrow.kernels import Impl, Operator
from sparrow.kernels.row_cache.policies import Policy, lru

_operator = Operator(__name__)

WAYS = 32


@dataclass(frozen=True, kw_only=True, eq=False)
class Frames:
    """What is known of the frames of a table of R rows. Frames 32 s to 32 s + 31 are the ways of
    set s.

    Args:
        rows: R < 2**31.
        tags_F: int32 [F], the row in each frame, -1 for none.
        stamps_F: int32 [F], the number of the last batch that used it.
        counts_R: uint8 [R], how many batches used each row, as its policy counts. Empty if it does
            not.
        policy: which row gives way.
    """

    rows: int
    tags_F: Tensor
    stamps_F: Tensor
    counts_R: Tensor
    policy: Policy = field(default_factory=lru.Config)

    @property
    def multiplier(self) -> int:
        """The factor a, near the golden section of R."""
        factor = max(1, round(self.rows * 0.6180339887))
        while math.gcd(factor, self.rows) != 1:
            factor += 1
        return factor

    def sets_of(self, rows_N: Tensor) -> Tensor:
        """Returns the set of each row, int64 [N]."""
        return rows_N.long() * self.multiplier % self.rows % (len(self.tags_F) // WAYS)


@dataclass(frozen=True, kw_only=True, eq=False)
class Moves:
    """What enters with a batch: rows_L into frames_L, int64 [L], where old_L was before, -1 for
    none, in any order.

    hits, unique: how many of the batch's different rows were in before, and how many there are.
    slots_N: where the rows of the batch are afterwards, see `slots_of`.
    """

    frames_L: Tensor
    rows_L: Tensor
    old_L: Tensor
    hits: int
    unique: int
    slots_N: Tensor


def admit(
    frames: Frames,
    rows_N: Tensor,
    batch: int,
    evictable: int,
    *,
    counts: bool = True,
    impl: Impl = "auto",
) -> Moves:
    """Decide which rows of a batch enter, and write it down. Returns what has to be copied.

    The result depends on the set of rows, not on their order. Rows of the batch that are in are
    stamped first. Then the others follow in ascending order. One takes a free frame of its set.
    Else it takes that of a row that no batch after `evictable` used, as the policy says. Without
    such a frame it stays out.

    Args:
        frames: is changed.
        rows_N: int32 or int64 [N], 0 <= row < R.
        batch: the number of this batch, above all before.
        evictable: the number of a batch before this one.
        counts: whether it is counted as a use of its rows. If not, they enter as if it were, and
            counts stay.
        impl: see `sparrow.kernels`.
    """
    counts_R, policy = frames.counts_R, frames.policy
    if policy.most and counts and batch % policy.halved == 0:
        counts_R.bitwise_right_shift_(1)
    before_N = counts_R[rows_N.long()] if policy.most and not counts else None
    moves: Moves = _operator.choose(impl, rows_N.device).admit(frames, rows_N, batch, evictable)
    if before_N is not None:
        counts_R[rows_N.long()] = before_N
    return moves


def count(frames: Frames, rows_U: Tensor) -> None:
    """Count a use of rows that are not admitted, as `admit` would. rows_U: int64 [U], each once."""
    if frames.policy.most:
        frames.counts_R[rows_U] += frames.counts_R[rows_U] < frames.policy.most


def slots_of(frames: Frames, rows_N: Tensor, *, impl: Impl = "auto") -> Tensor:
    """Returns the frame of each row, or F + row for a row that is out, int64 [N]. Nothing is
    changed.
    """
    slots_N: Tensor = _operator.choose(impl, rows_N.device).slots_of(frames, rows_N)
    return slots_N


def free_frames(frames: Frames, rows_U: Tensor) -> Tensor:
    """Returns a free frame for each of some rows that are out, or -1 where its set has none: int64
    [U].

    Rows that come first are served first.
    """
    free = (frames.tags_F < 0).nonzero()[:, 0]
    sets_U = frames.sets_of(rows_U)
    want, have = _numbered(sets_U), _numbered(free // WAYS)
    order = have.argsort()
    at = torch.searchsorted(have[order], want).clamp(max=max(len(have) - 1, 0))
    if not len(have):
        return torch.full_like(rows_U, -1)
    return torch.where(have[order][at] == want, free[order][at], -1)


def _numbered(sets_U: Tensor) -> Tensor:
    """Returns a number for each entry that says its set and its place among those of the set."""
    ordered, order = sets_U.sort(stable=True)
    first = torch.searchsorted(ordered, ordered)
    place = torch.empty_like(sets_U)
    place[order] = torch.arange(len(sets_U), device=sets_U.device) - first
    return sets_U * (1 << 31) + place


__all__ = ["WAYS", "Frames", "Moves", "Policy", "admit", "count", "free_frames", "slots_of"]
