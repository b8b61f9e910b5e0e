"""Rows in time order, whatever their number: spread over ranges of time that memory holds one by
one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from sparrow.core.arrays import Int64s
from sparrow.data.preparation.spool import Spool
from sparrow.features.quantile import Ordered

RANGE_BYTES = 1 << 25  # of rows that are sorted at a time
# files that are open at a time; of a log of more than 8 GiB as numbers, ranges are larger
MOST_RANGES = 256


def in_time_order(
    parted: Iterable[tuple[int, pa.Table]], times: Ordered, time: str, work: Path
) -> Iterator[tuple[int, pa.Table]]:
    """Yields (part, rows) with the rows of every part in the order of column `time`.

    Rows of one time keep the order in which they are given.

    Args:
        parted: (part, rows) in any order of time.
        times: of all rows.
        time: the column.
        work: a folder for what memory should not hold.
    """
    spools: dict[tuple[int, int], Spool] = {}
    edges: Int64s | None = None
    for part, table in parted:
        if not table.num_rows:
            yield part, table  # tells the columns
            continue
        if edges is None:
            edges = _edges(times, RANGE_BYTES * table.num_rows // max(table.nbytes, 1))
        range_N = np.searchsorted(edges, table[time].to_numpy(), "right")
        order = np.argsort(range_N, kind="stable")
        table = table.take(pa.array(order)).combine_chunks()
        bounds = np.searchsorted(range_N[order], np.arange(len(edges) + 2))
        for r in np.flatnonzero(np.diff(bounds)).tolist():
            if (part, r) not in spools:
                spools[part, r] = Spool(
                    work / f"range-{part}-{r}", 2 * RANGE_BYTES // (len(edges) + 1)
                )
            (batch,) = table.slice(bounds[r], bounds[r + 1] - bounds[r]).to_batches()
            spools[part, r].add(batch)
    for part, r in sorted(spools):
        assert edges is not None
        spool = spools[part, r]
        if 0 < r < len(edges) and edges[r] == edges[r - 1] + 1:
            yield from ((part, pa.table(batch)) for batch in spool)  # of one time
        else:
            table = pa.Table.from_batches(spool)
            order = np.argsort(table[time].to_numpy(), kind="stable")
            yield part, table.take(pa.array(order))
        spool.drop()


def _edges(times: Ordered, rows: int) -> Int64s:
    """Where in time ranges begin that hold about `rows` rows; a time with more rows is a range by
    itself.
    """
    rows = max(rows, len(times) // MOST_RANGES, 1)
    edges = times.at(range(rows, len(times), rows))
    repeated = edges[1:][edges[1:] == edges[:-1]]
    return np.unique(np.concatenate([edges, repeated + 1]))
