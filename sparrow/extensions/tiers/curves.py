"""How many of a table's rows a cache of any size would have at hand: its miss-ratio curve, from
sampled batches.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparrow.core.mixing import splitmix64

MOST = 1 << 16  # references of a trace that are kept: its curve is then within about 0.01
_HASHES = 1 << 24  # different hashes of rows


@dataclass(frozen=True, kw_only=True, eq=False)
class Curve:
    """What is known of the different rows of batches. A reference is a row in a batch, however
    often it is there.

    Args:
        references: of all batches.
        batches: how many batches there were.
        cold: the share of the references that are a row's first.
        most: different rows of a few consecutive batches, at most, see `Trace`.
        distances_N: float64, ascending: how many other rows were used since a row was used last.
            They are of sampled references that are not a row's first, scaled to all rows.
        near: the share of the references whose row is more popular than a sample tells. It counts
            as distance 0.
        weight: the share of all references that a distance stands for.
    """

    references: int
    batches: int
    cold: float
    most: int
    distances_N: Tensor
    near: float
    weight: float

    def miss_ratio(self, frames: float) -> float:
        """Returns the share of the references that an LRU cache with so many frames does not
        have.
        """
        hits = int(torch.searchsorted(self.distances_N, frames)) * self.weight + self.near
        return min(max(1.0 - hits, self.cold, 0.0), 1.0)


class Trace:
    """The rows that batches use, of which a share is kept: those whose hashes are small.

    Whatever the number of rows, all references of a kept row are there, so distances between them
    are those of the whole in small (SHARDS: Waldspurger et al., FAST 2015). The share is halved
    whenever there are more than `keep` references. Who adds the same batches gets the same.

    Args:
        keep: references to keep.
        window: of so many consecutive batches the different rows are counted.
    """

    def __init__(self, *, keep: int = MOST, window: int = 1) -> None:
        self._keep = keep
        self._window = window
        self._below = _HASHES
        self._count = 0
        self._rows: list[Tensor] = []
        self._counts: list[int] = []  # of all references, for each batch

    def add(self, rows_N: Tensor) -> None:
        """Add a batch. rows_N: int32 or int64 [N], in any order."""
        rows_U = rows_N.long().unique()
        self._counts.append(len(rows_U))
        self._rows.append(self._sampled(rows_U))
        self._count += len(self._rows[-1])
        while self._count > self._keep and self._below > 1:
            self._below //= 2
            self._rows = [self._sampled(rows_U) for rows_U in self._rows]
            self._count = sum(map(len, self._rows))

    @property
    def share(self) -> float:
        """The share of all rows that is kept."""
        return self._below / _HASHES

    def curve(self, after: int = 0) -> Curve:
        """Returns the curve of all batches so far.

        A sample that has too few of the most popular rows has too few references. Those that lack
        count as hits (the adjustment of SHARDS, section 3).

        Args:
            after: references of so many first batches are not counted. They fill the caches.
        """
        references = sum(self._counts[after:])
        rows_N = torch.cat([torch.zeros(0, dtype=torch.int64), *self._rows])
        lengths = torch.tensor([len(rows_U) for rows_U in self._rows], dtype=torch.int64)
        batch_N = torch.arange(len(lengths)).repeat_interleave(lengths)
        before_N = _before(rows_N)
        expected = max(references * self.share, 1.0)
        counts_N = batch_N >= after
        distances_A = _distances(batch_N, before_N)[counts_N[before_N >= 0]]
        return Curve(
            references=references,
            batches=max(len(self._counts) - after, 0),
            cold=min(int((counts_N & (before_N < 0)).sum()) / expected, 1.0),
            most=self._most(batch_N, before_N),
            distances_N=distances_A.sort().values.double() / self.share,
            near=(expected - int(counts_N.sum())) / expected if references else 0.0,
            weight=1.0 / expected,
        )

    def _sampled(self, rows_U: Tensor) -> Tensor:
        if self._below == _HASHES:
            return rows_U
        hashes_U = splitmix64(rows_U + 1) & (_HASHES - 1)
        return rows_U[hashes_U < self._below]

    def _most(self, batch_N: Tensor, before_N: Tensor) -> int:
        """Returns how many different rows consecutive batches have, at most: their references less
        those repeated.
        """
        parts_N = batch_N // self._window
        repeated_N = (before_N >= 0) & (parts_N[before_N.clamp(min=0)] == parts_N)
        unlike = 1.0 - float(repeated_N.double().mean()) if len(batch_N) else 1.0
        sums = torch.tensor([0, *self._counts]).cumsum(0)
        few = min(self._window, len(self._counts))
        together = int((sums[few:] - sums[: len(sums) - few]).max()) if few else 0
        return max(round(together * unlike), max(self._counts, default=0))


def _before(rows_N: Tensor) -> Tensor:
    """Returns for each reference the place of the one before to the same row, or -1, int64 [N]."""
    ordered, order = rows_N.sort(stable=True)
    before = torch.full_like(rows_N, -1)
    repeated = (ordered[1:] == ordered[:-1]).nonzero()[:, 0]
    before[order[repeated + 1]] = order[repeated]
    return before


def _distances(batch_N: Tensor, before_N: Tensor) -> Tensor:
    """Returns how many other rows were used between two references to a row, for those that are not
    the first.

    A row counts if it was used last after this row, before the batch. Of two rows of a batch the
    higher counts as the later one. So the distance is the number of all references between, less
    those that were repeated between.

    Args:
        batch_N: the batch of each reference, ascending; within it rows ascend.
        before_N: what `_before` returns.
    """
    start_N = torch.searchsorted(batch_N, batch_N)
    place_A = (before_N >= 0).nonzero()[:, 0]
    before_A = before_N[place_A]
    start_A = start_N[place_A]
    # within a batch those with an earlier place come first, so that none of the same batch is an
    # earlier larger one
    order_A = torch.argsort(start_A * (len(before_N) + 1) + before_A)
    ranks_A = torch.empty_like(order_A)
    ranks_A[before_A.argsort()] = torch.arange(len(before_A))
    repeated_A = torch.empty_like(order_A)
    repeated_A[order_A] = larger_before(ranks_A[order_A])
    return start_A - before_A - 1 - repeated_A


def larger_before(ranks_N: Tensor) -> Tensor:
    """Returns for each entry how many entries before it are larger, int64 [N].

    Entries are parted by their highest bit, then each part by the next, and so on. In each part,
    those with the bit are larger than those without.

    Args:
        ranks_N: a permutation of 0 <= rank < N.
    """
    count_R = torch.zeros_like(ranks_N)  # of each rank
    values_N = ranks_N.clone()
    place_N = torch.arange(len(ranks_N))
    for bit in reversed(range(max(len(ranks_N) - 1, 0).bit_length())):
        upper_N = values_N >> bit & 1
        upper_before_N1 = torch.cat([upper_N.new_zeros(1), upper_N.cumsum(0)])
        start_N = values_N >> (bit + 1) << (bit + 1)  # ranks of a part are places of the part
        upper_before_N = upper_before_N1[:-1] - upper_before_N1[start_N]
        count_R[values_N] += torch.where(upper_N == 1, 0, upper_before_N)
        upper_place_N = start_N + (1 << bit) + upper_before_N
        to_N = torch.where(upper_N == 1, upper_place_N, place_N - upper_before_N)
        values_N = torch.empty_like(values_N).scatter_(0, to_N, values_N)
    return count_R[ranks_N]
