"""The compiled operators with the signatures of the reference."""

from __future__ import annotations

import torch
from torch import Tensor

from sparrow.core.pages import empty_rows
from sparrow.kernels import missing
from sparrow.kernels.row_index import COUNT_NAMES, Admitted, Index, slots

assert not missing(), "`resolve` comes first"
ops = torch.ops.sparrow


class _Work:
    """A hash table of the ids that have rows, and a heap of the rows of each full bucket."""

    def __init__(self, index: Index) -> None:
        rows, policy, buckets = len(index.ids_R), index.policy, len(index.buckets)
        self.table_T2 = empty_rows(slots(rows), 2, dtype=torch.int64)
        self.heaps_H2 = torch.empty(rows // 8 + 33 * buckets, 2, dtype=torch.int64)
        self.state_B5 = torch.empty(buckets, 5, dtype=torch.int64)
        signed = index.key - (1 << 64) if index.key >= 1 << 63 else index.key
        numbers = [
            policy.shift,
            index.buckets.start,
            policy.after,
            policy.evict == "lfu",
            policy.ttl or -1,
            signed,
        ]
        self.tensors = [
            index.ids_R,
            index.times_R,
            index.counts_R,
            index.sightings_RC,
            index.starts_B1,
        ]
        self.tensors += [self.table_T2, self.heaps_H2, self.state_B5, torch.tensor(numbers)]
        ops.row_index_build(self.tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of what is kept beside the rows."""
        return self.table_T2.nbytes + self.heaps_H2.nbytes + self.state_B5.nbytes


def _tensors(index: Index) -> list[Tensor]:
    if not isinstance(index.work, _Work):
        index.work = _Work(index)
    return index.work.tensors


def keys_of(ids_N: Tensor) -> Tensor:
    """See the package."""
    keys_N: Tensor = ops.row_index_keys(ids_N)
    return keys_N


def find(index: Index, keys_N: Tensor, now: int) -> Tensor:
    """See the package."""
    rows_N: Tensor = ops.row_index_find(_tensors(index), keys_N.contiguous(), now)
    return rows_N


def admit(index: Index, keys_N: Tensor, now: int, batch: int, settled: int) -> Admitted:
    """See the package."""
    rates = (index.policy.half_life or 0.0, index.policy.probability)
    rows_N, changes = ops.row_index_admit(
        _tensors(index), keys_N.contiguous(), now, batch, settled, *rates
    )
    counts = dict(zip(COUNT_NAMES, changes[: len(COUNT_NAMES)].tolist(), strict=True))
    rest = changes[len(COUNT_NAMES) :]
    if not len(rest):  # most batches: tensors that nobody needs would take a tenth of the call
        return Admitted(rows_N, rest, rest, rest, counts)
    count = counts["admitted"]
    return Admitted(rows_N, rest[:count], rest[count : 2 * count], rest[2 * count :], counts)
