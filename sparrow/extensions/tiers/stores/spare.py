"""`Spare`: frames that stand by for rows whose places in the cache are taken."""

from __future__ import annotations

import torch
from torch import Tensor


class Spare:
    """Which rows are in frames that stand by. They stay there while batches under way have them.

    Args:
        first: the number of the first such frame.
        frames: how many there are.
    """

    def __init__(self, *, first: int, frames: int) -> None:
        none = torch.zeros(0, dtype=torch.int64)
        self.rows_H = none  # ascending
        self._frames_H = none
        self._batches_H = none  # the last batch that has the row
        self._returned = none  # frames that were used before, and are free
        # the lowest frame that was never used: memory that nobody touches costs nothing
        self._next = first
        self._end = first + frames

    @property
    def free(self) -> int:
        """How many frames are free."""
        return len(self._returned) + self._end - self._next

    @property
    def held(self) -> tuple[Tensor, Tensor, Tensor]:
        """The rows that are here, their frames in ascending order, and the last batch that has
        each.
        """
        frames_H, order_H = self._frames_H.sort()
        return self.rows_H[order_H], frames_H, self._batches_H[order_H]

    def find(self, rows_N: Tensor) -> Tensor:
        """Returns the frame of each row, or -1: int64 [N]."""
        place_N, is_here_N = self._places(rows_N)
        return (
            torch.where(is_here_N, self._frames_H[place_N], -1)
            if len(self.rows_H)
            else torch.full_like(rows_N, -1)
        )

    def use(self, rows_U: Tensor, batch: int) -> Tensor:
        """Returns which rows are here, bool [U]. A batch has them."""
        place_U, is_here_U = self._places(rows_U)
        at = place_U[is_here_U]
        # a later one may have it already
        self._batches_H[at] = self._batches_H[at].clamp(min=batch)
        return is_here_U

    def take(self, rows_U: Tensor, batch: int | Tensor) -> Tensor:
        """Returns free frames for rows that are not here, int64 [U]. batch: the last that has them,
        or of each its.
        """
        reused = min(len(rows_U), len(self._returned))
        fresh = torch.arange(self._next, self._next + len(rows_U) - reused)
        frames_U = torch.cat([self._returned[:reused], fresh])
        self._returned = self._returned[reused:]
        self._next += len(fresh)
        self.rows_H, order_H = torch.cat([self.rows_H, rows_U]).sort()
        self._frames_H = torch.cat([self._frames_H, frames_U])[order_H]
        self._batches_H = torch.cat([self._batches_H, torch.zeros_like(rows_U) + batch])[order_H]
        return frames_U

    def leaving(self, last: int) -> tuple[Tensor, Tensor]:
        """Returns the rows that no batch after `last` has, and the frames in which they were. They
        are free now.
        """
        goes_H = self._batches_H <= last
        rows_U = self.rows_H[goes_H]
        frames_U = self._frames_H[goes_H]
        if len(rows_U):
            self.rows_H, self._frames_H, self._batches_H = (
                values_H[~goes_H] for values_H in (self.rows_H, self._frames_H, self._batches_H)
            )
            self._returned = torch.cat([self._returned, frames_U])
        return rows_U, frames_U

    def _places(self, rows_N: Tensor) -> tuple[Tensor, Tensor]:
        """Returns where each row would be among those that are here, and whether it is."""
        if not len(self.rows_H):
            return torch.zeros_like(rows_N), torch.zeros(len(rows_N), dtype=torch.bool)
        place_N = torch.searchsorted(self.rows_H, rows_N).clamp(max=len(self.rows_H) - 1)
        return place_N, self.rows_H[place_N] == rows_N
