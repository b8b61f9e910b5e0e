"""The definition, an id at a time."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparrow.core.mixing import mix63, splitmix64, unmix63

if TYPE_CHECKING:
    from sparrow.kernels.row_index import Admitted, Index, Policy

GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)


class _Work:
    """Where ids are, and which batch of this process used them last."""

    def __init__(self, index: Index) -> None:
        self.row_of = {id: row for row, id in enumerate(index.ids_R.tolist()) if id >= 0}
        self.stamp_of: dict[int, int] = {}
        self.freed: list[int] = []


def _work(index: Index) -> _Work:
    if not isinstance(index.work, _Work):
        index.work = _Work(index)
    return index.work


def find(index: Index, keys_N: Tensor, now: int) -> Tensor:
    """See the package."""
    work, policy = _work(index), index.policy
    ids = unmix63(keys_N + (index.buckets.start << policy.shift)).tolist()
    shared = index.starts_B1[keys_N >> policy.shift].tolist()
    times = index.times_R.tolist()

    def row(id: int, instead: int) -> int:
        known = work.row_of.get(id, instead)
        return instead if _is_old(index, id, times[known], now) else known

    return torch.tensor(
        [row(id, instead) for id, instead in zip(ids, shared, strict=True)], dtype=torch.int64
    )


def admit(index: Index, keys_N: Tensor, now: int, batch: int, settled: int) -> Admitted:
    """See the package."""
    from sparrow.kernels.row_index import COUNT_NAMES, FREE, Admitted  # which imports this file

    work = _work(index)
    policy = index.policy
    counts = dict.fromkeys(COUNT_NAMES, 0)
    counts["looked_up"] = len(keys_N)
    begun: dict[int, int] = {}
    work.freed = []
    without_row: list[tuple[int, int]] = []
    first_key = index.buckets.start << policy.shift
    for key in keys_N.unique().tolist():
        id = int(unmix63(torch.tensor(key + first_key)))
        row = work.row_of.get(id)
        in_use = work.stamp_of.get(id, 0) > settled
        if row is None or (not in_use and _is_old(index, id, int(index.times_R[row]), now)):
            without_row.append((key, id))
        else:
            _use(index, row, now)
            work.stamp_of[id] = batch
            counts["hits"] += 1
    for key, id in without_row:
        bucket = key >> policy.shift
        if id in work.row_of:
            _free(index, work, id)
            counts["expired"] += 1
        if not _is_admitted(index, bucket, key + first_key, batch):
            counts["waiting"] += 1
            continue
        row, lost, old = _place(index, work, bucket, now, settled)
        counts["expired"] += old
        if row is None:
            counts["crowded"] += 1
            continue
        counts["evicted"] += lost
        counts["admitted"] += 1
        assert int(index.ids_R[row]) == FREE
        index.ids_R[row], index.times_R[row], index.counts_R[row] = id, now, 1.0
        work.row_of[id], work.stamp_of[id] = row, batch
        begun[row] = id
    rows_N = find(index, keys_N, now)
    counts["live"] = int((index.ids_R[rows_N] >= 0).sum())
    return Admitted(
        rows_N=rows_N,
        begun_L=torch.tensor(list(begun), dtype=torch.int64),
        ids_L=torch.tensor(list(begun.values()), dtype=torch.int64),
        freed_F=torch.tensor(work.freed, dtype=torch.int64),
        counts=counts,
    )


def _is_old(index: Index, id: int, time: int, now: int) -> bool:
    return index.policy.ttl is not None and id != 0 and now - time > index.policy.ttl


def _use(index: Index, row: int, now: int) -> None:
    if index.policy.evict == "lfu":
        count = float(index.counts_R[row])
        time = int(index.times_R[row])
        half_life = index.policy.half_life
        if half_life:
            count *= 2.0 ** ((time - now) / half_life)
        index.counts_R[row] = 1.0 + count
    index.times_R[row] = now


def _free(index: Index, work: _Work, id: int) -> None:
    from sparrow.kernels.row_index import FREE  # which imports this file

    row = work.row_of.pop(id)
    index.ids_R[row] = FREE
    work.freed.append(row)
    work.stamp_of.pop(id, None)


def _is_admitted(index: Index, bucket: int, key: int, batch: int) -> bool:
    """Whether a sighting of an id that has no row admits it."""
    policy = index.policy
    if policy.after > 1:
        first, last = index.starts_B1[bucket : bucket + 2].tolist()
        counters = index.sightings_RC[first:last].view(-1)
        chosen = torch.tensor(key) + torch.arange(1, 5) * GOLDEN
        at = ((splitmix64(chosen) >> 1) & ((1 << 62) - 1)) % len(counters)
        sightings = min(int(counters[at].min()) + 1, 255)
        counters[at] = counters[at].clamp(min=sightings)
        index.counts_R[first] += 1
        if int(index.counts_R[first]) >= last - first:
            counters.bitwise_right_shift_(1)
            index.counts_R[first] = 0
        if sightings < policy.after:
            return False
    if policy.probability == 1:
        return True
    signed = index.key - (1 << 64) if index.key >= 1 << 63 else index.key
    mixed = splitmix64(torch.tensor(key) ^ splitmix64(torch.tensor(signed) + batch * 2))
    return float((mixed >> 11) & ((1 << 53) - 1)) * 2.0**-53 < policy.probability


def _place(
    index: Index, work: _Work, bucket: int, now: int, settled: int
) -> tuple[int | None, int, int]:
    """Returns a free row for an id, or None; how many ids were evicted for it; and how many were
    too old.
    """
    from sparrow.kernels.row_index import FREE  # which imports this file

    first, last = index.starts_B1[bucket : bucket + 2].tolist()
    own = range(first + (2 if index.first == 0 and bucket == 0 else 1), last)
    old = 0
    free = [row for row in own if int(index.ids_R[row]) == FREE]
    held = [row for row in own if work.stamp_of.get(int(index.ids_R[row]), 0) <= settled]
    if not free:
        for row in held:
            if _is_old(index, int(index.ids_R[row]), int(index.times_R[row]), now):
                _free(index, work, int(index.ids_R[row]))
                free.append(row)
                old += 1
    if free:
        return free[0], 0, old
    judged = [
        (_worth(index.policy, float(index.counts_R[row]), int(index.times_R[row])), row)
        for row in held
    ]
    if not judged:
        return None, 0, 0
    row = min(judged)[1]
    _free(index, work, int(index.ids_R[row]))
    work.freed.pop()  # it is given away
    return row, 1, 0


def _worth(policy: Policy, count: float, time: int) -> float:
    """Returns by what an id is judged when its bucket is full. It only grows, and only when the id
    is used.
    """
    if policy.evict == "lru":
        return float(time)
    return math.log2(count) + (time / policy.half_life if policy.half_life else 0.0)


def keys_of(ids_N: Tensor) -> Tensor:
    """See the package."""
    keys_N: Tensor = mix63(ids_N)
    return keys_N
