"""Rows of a session side by side within a partition of time, whatever their number (RecD's O2,
arXiv 2211.05239).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from sparrow.core.errors import UserError
from sparrow.data.preparation.spool import Spool, gathered
from sparrow.features.quantile import Ordered
from sparrow.features.runs import mixed
from sparrow.features.schema import Schema
from sparrow.features.times import ticks_per_second

HELD_BYTES = 1 << 25  # of rows that are sorted at a time
BITS = 6  # at most, of a session's number, by which a partition is cut that memory does not hold


def clustered(
    parted: Iterable[tuple[int, pa.Table]], session: str, time: str, partition: int, work: Path
) -> Iterator[tuple[int, pa.Table]]:
    """Yields (part, rows) with the rows of each session side by side.

    Within a partition [k * partition, (k + 1) * partition) of the time, sessions stand one after
    the other, in the order of their mixed numbers. Rows of one session stay in the order in which
    they came. So the same rows give the same order wherever it is made.

    Args:
        parted: (part, rows) in the order of column `time`.
        session: the column of the sessions.
        time: the column of the time. Its order is kept from one partition to the next.
        partition: how much of the time a partition is; 0 for all of a part.
        work: a folder for what memory should not hold.
    """
    now: dict[int, tuple[int, Spool]] = {}  # of each part, the partition that is being filled
    for part, table in parted:
        if not table.num_rows:
            yield part, table  # tells the columns
            continue
        k_N = (
            table[time].to_numpy() // partition if partition else np.zeros(table.num_rows, np.int64)
        )
        edges = [0, *(np.flatnonzero(np.diff(k_N)) + 1).tolist(), table.num_rows]
        for first, last in itertools.pairwise(edges):
            k = int(k_N[first])
            if part in now and now[part][0] != k:
                yield from _ordered(now.pop(part)[1], part, session, work, 0)
            if part not in now:
                now[part] = k, Spool(work / f"partition-{part}", HELD_BYTES)
            (batch,) = table.slice(first, last - first).combine_chunks().to_batches()
            now[part][1].add(batch)
    for part, (_, held) in sorted(now.items()):
        yield from _ordered(held, part, session, work, 0)


def partition_length(schema: Schema, times: Ordered | None) -> int:
    """Returns the length of a partition in the time column's unit; 0 for one partition, or where
    there is no time.

    Args:
        schema: has a cluster.
        times: of all rows, if they have one.

    Raises:
        UserError: for a time that is none since 1970.
    """
    assert schema.cluster is not None
    if not schema.cluster.hours or not times:
        return 0
    time, last = schema.role("time"), float(times.at([len(times) - 1])[0])
    if not (unit := ticks_per_second(last)):
        looks = f"column {time!r} ends with {last:g}, which is no time since 1970"
        raise UserError(f"cluster.hours: {looks}; give the column a format, or 0 hours")
    return max(1, int(schema.cluster.hours * 3600 * unit))


def _ordered(
    held: Spool, part: int, session: str, work: Path, used: int
) -> Iterator[tuple[int, pa.Table]]:
    """All of a spool's rows by session; sessions agree in the first `used` bits of their mixed
    numbers.
    """
    bits = min(BITS, (held.bytes // HELD_BYTES).bit_length() + 1)
    if held.bytes <= HELD_BYTES:
        if held.rows:
            table = pa.Table.from_batches(held)
            yield (
                part,
                table.take(pa.array(np.argsort(mixed(table[session].to_numpy()), kind="stable"))),
            )
        held.drop()
        return
    buckets = [Spool(work / f"bucket-{used}-{b}", HELD_BYTES >> bits) for b in range(1 << bits)]
    sessions: list[set[int]] = [set() for _ in buckets]
    for batch in gathered(held, held.rows, HELD_BYTES >> 2):
        key_N = mixed(batch.column(session).to_numpy())
        bucket_N = (key_N << np.uint64(used)) >> np.uint64(64 - bits)
        order = np.argsort(bucket_N, kind="stable")
        ends = np.searchsorted(bucket_N[order], np.arange(len(buckets) + 1))
        batch = batch.take(pa.array(order))
        for b in np.flatnonzero(np.diff(ends)).tolist():
            buckets[b].add(batch.slice(ends[b], ends[b + 1] - ends[b]))
            if len(sessions[b]) < 2:
                sessions[b].update(np.unique(key_N[order[ends[b] : ends[b + 1]]])[:2].tolist())
    held.drop()
    for bucket, keys in zip(buckets, sessions, strict=True):
        if len(keys) == 1:  # it may be larger than memory
            yield from ((part, pa.Table.from_batches([batch])) for batch in bucket)
            bucket.drop()
        else:
            yield from _ordered(bucket, part, session, work, used + bits)
