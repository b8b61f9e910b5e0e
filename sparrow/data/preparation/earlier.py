"""Columns with counts in preparation: a training row gets those of earlier training rows, another
row those of all.

Earlier are rows of an earlier time. So rows of one time do not see each other, nor do those of one
request. A log without a time has an order that is drawn at random, in which the rows of a group
stand together (`Cutter.order`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from sparrow.core.arrays import Bools, Float64s, Int64s
from sparrow.core.errors import UserError
from sparrow.data.preparation.cutter import Cutter
from sparrow.features.counts import NOTHING, PRIOR, Counted, numbers
from sparrow.features.hashing import row_hashes
from sparrow.features.quantile import Ordered
from sparrow.features.schema import Schema
from sparrow.features.transforms import Transforms

SORTED = 1 << 20  # rows of a column that are sorted at a time
# orders at which the counts of all ids together are known; more rows share them
MOST_EDGES = 1 << 20


def with_defaults(schema: Schema) -> Schema:
    """Returns the schema with what columns with counts do not say.

    Raises:
        UserError: for a label that is none.
    """
    columns = dict(schema.columns)
    for name in schema.counted:
        column = columns[name]
        if column.label is not None and column.label not in schema.labels:
            raise UserError(
                f"columns.{name}.label: no label {column.label!r}; the labels are {schema.labels}"
            )
        if column.counts == "rate":
            columns[name] = replace(column, prior=PRIOR if column.prior is None else column.prior)
        else:
            columns[name] = replace(column, transform=column.transform or "log")
    return replace(schema, columns=columns)


class Earlier:
    """Puts numbers in the place of ids that are to be counted.

    Args:
        given: the transforms before they are fitted. Counts that they have stay as they are, for
            all rows.
        cutter: says which rows are for training.
        work: a folder for 56 bytes a row and column.
        rows: how many there are.
        grow: whether given counts go on instead.
    """

    def __init__(
        self, transforms: Transforms, cutter: Cutter, work: Path, rows: int, *, grow: bool = False
    ) -> None:
        schema = transforms.schema
        self._schema = schema
        self._cutter = cutter
        self._transforms = transforms
        self._tallies: dict[str, _Tally] = {}
        for i, name in enumerate(schema.counted):
            if grow or name not in transforms.counts:
                before = transforms.counts.get(name, NOTHING)
                self._tallies[name] = _Tally(schema, name, before, work / f"counts-{i}", rows)
        self._after = transforms

    def count(self, batches: Iterable[pa.RecordBatch]) -> Transforms:
        """Takes in all typed rows, in the log's order. Returns the transforms with the counts after
        training.

        Raises:
            UserError: for a training row that is not later than those that were counted before.
        """
        row0 = 0
        for batch in batches if self._tallies else ():
            train_N, order_N = self._cutter.parts(batch, row0) == 0, self._cutter.order(batch, row0)
            for tally in self._tallies.values():
                tally.add(batch, order_N, row0, train_N)
            row0 += batch.num_rows
        counts = {
            **self._transforms.counts,
            **{name: tally.finish() for name, tally in self._tallies.items()},
        }
        columns = dict(self._schema.columns)
        for name, tally in self._tallies.items():
            until = tally.last if self._schema.role("time") else None
            columns[name] = replace(columns[name], digest=counts[name].digest, until=until)
        self._after = replace(
            self._transforms, schema=replace(self._schema, columns=columns), counts=counts
        )
        return self._after

    def numbered(self, batch: pa.RecordBatch, row0: int) -> pa.RecordBatch:
        """Returns typed rows with numbers for ids that are to be counted. row0: the log's row of
        the first one.
        """
        if not self._schema.counted:
            return batch
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        train_N = self._cutter.parts(batch, row0) == 0
        order_N = self._cutter.order(batch, row0)
        for name in self._schema.counted:
            if name in self._tallies:
                after = self._after.counts[name]
                numbers_N = self._tallies[name].numbers(
                    columns[name], order_N, row0, train_N, after
                )
                columns[name] = pa.array(numbers_N)
            else:
                columns[name] = self._after.number_of(name, columns[name])
        return pa.RecordBatch.from_pydict(columns)


class _Tally:
    """The ids of a column in training: what each was before each row, and is after all.

    last: the greatest order. An entry, a column int64 [5], is an id's hash, the row's order, the
    row, and what it adds: how many rows it stands for, and how many of these have a label of 1. A
    row without a label adds nothing.
    """

    def __init__(self, schema: Schema, name: str, before: Counted, path: Path, rows: int) -> None:
        self._name = name
        self._column = schema.columns[name]
        self._before = before
        self._path = path
        self._label: str | None = None
        if self._column.counts != "seen":
            self._label = self._column.label or schema.labels[0]
        self._impressions = schema.role("impressions")
        self._entries_5E = np.memmap(
            path.with_suffix(".rows"), np.int64, "w+", shape=(5, max(rows, 1))
        )
        self._earlier_2N = np.memmap(
            path.with_suffix(".earlier"), np.int64, "w+", shape=(2, max(rows, 1))
        )
        self._size = 0
        self._since = None if before is NOTHING else self._column.until
        self.last = self._since

    def add(self, batch: pa.RecordBatch, order_N: Int64s, row0: int, train_N: Bools) -> None:
        """Takes in typed rows."""
        hashes_N = row_hashes(batch.column(self._name))
        shown_N = np.ones(len(hashes_N), np.int64)
        positives_N = np.zeros(len(hashes_N), np.int64)
        if self._impressions is not None:
            shown_N = batch.column(self._impressions).to_numpy().astype(np.int64)
        if self._label is not None:
            y_N = batch.column(self._label).to_numpy(zero_copy_only=False).astype(np.float64)
            positives_N = np.rint(np.nan_to_num(y_N) * shown_N).astype(np.int64)
            shown_N = np.where(np.isnan(y_N), 0, shown_N)
        at = np.flatnonzero(train_N & (hashes_N != 0))
        if not len(at):
            return
        if self._since is not None and (early_M := order_N[at] <= self._since).any():
            fact = f"row {row0 + at[early_M][0]} is not later than {self._since}"
            remedy = "grow with later rows only, or leave grow out"
            raise UserError(
                f"columns.{self._name}.until: {fact}, the time of the last row counted before;"
                f" {remedy}"
            )
        entries = self._entries_5E[:, self._size : self._size + len(at)]
        entries[:] = hashes_N[at], order_N[at], row0 + at, shown_N[at], positives_N[at]
        self._size += len(at)
        latest = int(order_N[at].max())
        self.last = latest if self.last is None else max(latest, self.last)

    def finish(self) -> Counted:
        """Returns the counts after training, once all rows were taken in."""
        counts = [self._before]
        parts = max(-(-self._size // SORTED), 1)
        ends = [((k + 1) << 63) // parts - 1 for k in range(parts)]  # hashes are spread evenly
        for low, high in zip([0, *(end + 1 for end in ends)], ends, strict=False):
            hash_E = self._entries_5E[0, : self._size]
            counts.append(self._counted(np.flatnonzero((hash_E >= low) & (hash_E <= high))))
        self._set_totals()
        hashes_V = np.concatenate([part.hashes_V for part in counts])
        counts_2V = np.concatenate([part.counts_2V for part in counts], axis=1)
        return Counted.sum_by_hash(hashes_V, counts_2V)

    def numbers(
        self, coded: pa.DictionaryArray, order_N: Int64s, row0: int, train_N: Bools, after: Counted
    ) -> Float64s:
        """Returns the numbers of rows. after: what `finish` gave."""
        hashes_N = row_hashes(coded)
        counts_2N = after.at(hashes_N)
        totals_2N = np.repeat(after.totals_2[:, None], len(hashes_N), axis=1)
        at = np.flatnonzero(train_N)
        counts_2N[:, at] = self._earlier_2N[:, row0 + at]
        totals_2N[:, at] = self._totals_2K[:, np.searchsorted(self._edges, order_N[at], "right")]
        return numbers(self._column, hashes_N, counts_2N, totals_2N)

    def _counted(self, at: Int64s) -> Counted:
        """The counts of some entries, which hold all of their ids; those before each go to the
        row's place.
        """
        entries_5E = self._entries_5E[:, at]
        by = np.lexsort((entries_5E[1], entries_5E[0]))
        hash_E, order_E, row_E, *adds = entries_5E[:, by]
        sums_2E1 = np.zeros((2, len(by) + 1), np.int64)
        np.cumsum(adds, axis=1, out=sums_2E1[:, 1:])
        id_begins_E = np.append(True, hash_E[1:] != hash_E[:-1])[: len(by)]
        begins_E = id_begins_E | np.append(True, order_E[1:] != order_E[:-1])[: len(by)]
        place_E = np.arange(len(by))
        id_first_E = np.maximum.accumulate(np.where(id_begins_E, place_E, 0))
        first_E = np.maximum.accumulate(np.where(begins_E, place_E, 0))
        since_id_began_2E = sums_2E1[:, first_E] - sums_2E1[:, id_first_E]
        self._earlier_2N[:, row_E] = since_id_began_2E + self._before.at(hash_E)
        firsts = np.flatnonzero(id_begins_E)
        ends = np.append(firsts[1:], len(by))[: len(firsts)]
        return Counted(hash_E[firsts], sums_2E1[:, ends] - sums_2E1[:, firsts])

    def _set_totals(self) -> None:
        """Finds the counts of all ids together, of the rows before each edge. Up to MOST_EDGES
        orders are edges.
        """
        order_E, adds_2E = self._entries_5E[1, : self._size], self._entries_5E[3:, : self._size]
        orders = Ordered(self._path.with_suffix(".orders"), np.int64)
        orders.add(order_E)
        places = (
            range(0, self._size, -(-self._size // MOST_EDGES) or 1)
            if self._column.counts == "rate"
            else ()
        )
        self._edges = np.unique(orders.at(places))
        self._totals_2K = np.zeros((2, len(self._edges) + 1), np.int64)
        for low in range(0, self._size, SORTED):
            place_E = np.searchsorted(self._edges, order_E[low : low + SORTED], "right")
            for total_K, adds_E in zip(
                self._totals_2K, adds_2E[:, low : low + SORTED], strict=True
            ):
                # exact below 2^53
                total_K += np.bincount(place_E, adds_E, len(total_K)).astype(np.int64)
        # of the k-th edge: what lies before it, in the places 0..k - 1 of those that were counted
        sums_2K = np.cumsum(self._totals_2K, axis=1)
        self._totals_2K = self._before.totals_2[:, None] + np.pad(sums_2K[:, :-1], ((0, 0), (1, 0)))
