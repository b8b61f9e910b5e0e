"""Which part each row belongs to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from sparrow.core.arrays import Float64s, Int64s
from sparrow.data.batches.parts import PARTS
from sparrow.features.hashing import mix, row_hashes
from sparrow.features.schema import Schema

# what `Cutter.parts` says of training rows that `split.negatives` leaves out, of later rows and of
# empty ones
LEFT_OUT = len(PARTS)


class Cut(NamedTuple):
    """Where a part begins: at the rows of `first`, a time or a row, but for a share of these that
    are drawn.
    """

    first: int
    before: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Cutter:
    """Which part (an index into PARTS, or LEFT_OUT) each row belongs to.

    cuts: by time, where valid, test and, where the split has an `until`, what is left out begin; by
    file, the first rows of valid and test. By ratio, and among rows of a time that are drawn, the
    part is a function of the seed and of the row's group, or session where no column is a group; a
    row without one has a part of its own.
    """

    schema: Schema
    cuts: tuple[Cut, ...] = (Cut(0), Cut(0))

    def parts(self, batch: pa.RecordBatch, row0: int) -> Int64s:
        """Returns the part of each typed row, int64 [N]. row0: the log's row of the batch's first
        one.
        """
        split = self.schema.split
        time = self.schema.role("time")
        rows_N = np.arange(row0, row0 + batch.num_rows)
        if split.by == "ratio":
            shares = np.array([1 - split.valid - split.test, 1 - split.test])
            uniform_N = _uniform(split.seed, self._keys(batch, row0))
            parts_N = np.searchsorted(shares, uniform_N, side="right")
        else:
            by_N = rows_N if split.by == "file" else batch.column(str(time)).to_numpy()
            firsts = np.array([cut.first for cut in self.cuts])
            parts_N = np.searchsorted(firsts, by_N, side="right")
            # of these rows some belong to parts before
            for first in {cut.first for cut in self.cuts if cut.before}:
                at = np.flatnonzero(by_N == first)
                before = [cut.before for cut in self.cuts if cut.first == first]
                drawn_M = _uniform(split.seed, self._keys(batch, row0)[at])
                parts_N[at] += np.searchsorted(before, drawn_M, side="right") - len(before)
        if split.negatives < 1:
            drawn_N = _uniform(split.seed + 1, rows_N) < split.negatives
            negative_N = batch.column(self.schema.labels[0]).to_numpy() == 0
            parts_N = np.where((parts_N == 0) & negative_N & ~drawn_N, LEFT_OUT, parts_N)
        if impressions := self.schema.role("impressions"):
            parts_N = np.where(batch.column(impressions).to_numpy() == 0, LEFT_OUT, parts_N)
        return parts_N

    def order(self, batch: pa.RecordBatch, row0: int) -> Int64s:
        """Returns what says which typed rows are earlier than which, int64 [N].

        It is the time. A log without one has an order that is drawn from the seed, in which whole
        groups stand together as they do in a split by ratio.
        """
        if time := self.schema.role("time"):
            return batch.column(time).to_numpy()
        drawn_N: Int64s = (
            _uniform(self.schema.split.seed + 2, self._keys(batch, row0)) * 2.0**62
        ).astype(np.int64)
        return drawn_N

    def _keys(self, batch: pa.RecordBatch, row0: int) -> Int64s:
        """What is drawn by: the id of each row in the split's key, group or session, else the
        row.
        """
        rows_N = np.arange(row0, row0 + batch.num_rows)
        key = self.schema.split_key
        if key is None:
            return rows_N
        ids = batch.column(key)
        coded = pa.types.is_dictionary(ids.type)
        ids_N = row_hashes(ids) if coded else ids.to_numpy()  # above 0 where there is one
        return np.where(ids_N > 0, ids_N, rows_N)


def _uniform(seed: int, keys_N: Int64s) -> Float64s:
    """Returns a number in [0, 1) for each row or group, drawn from the seed."""
    start = mix(np.array([seed % (1 << 64)], np.uint64))
    return mix(start ^ keys_N.astype(np.uint64)) / 2.0**64
