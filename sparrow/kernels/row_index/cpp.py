"""The compiled operators with the signatures of the reference."""

from __future__ import annotations

import torch
from torch import Tensor

from sparrow.kernels import missing
from sparrow.kernels.row_index import TOLD, Admitted, Index, slots

assert not missing(), "`resolve` comes first"
ops = torch.ops.sparrow


class _Work:
    """A hash table of the ids that have rows, and a heap of the rows of each full bucket."""

    def __init__(self, index: Index) -> None:
        rows, policy = len(index.ids_R), index.policy
        self.table_T2 = torch.empty(slots(rows), 2, dtype=torch.int64)
        self.worth_R = torch.empty(rows, dtype=torch.float64)
        self.heap_R = torch.empty(rows, dtype=torch.int32)
        self.state_B3 = torch.empty(len(index.buckets), 3, dtype=torch.int64)
        signed = index.key - (1 << 64) if index.key >= 1 << 63 else index.key
        numbers = [policy.shift, index.buckets.start, policy.after, policy.evict == "lfu", policy.ttl or -1, signed]
        self.tensors = [index.ids_R, index.times_R, index.counts_R, index.sightings_RC, index.starts_B1]
        self.tensors += [self.table_T2, self.worth_R, self.heap_R, self.state_B3, torch.tensor(numbers)]
        ops.row_index_build(self.tensors)


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
    made = ops.row_index_admit(_tensors(index), keys_N.contiguous(), now, batch, settled, *rates)
    rows_N, begun_L, ids_L, counts = made
    return Admitted(rows_N=rows_N, begun_L=begun_L, ids_L=ids_L, counts=dict(zip(TOLD, counts.tolist(), strict=True)))
