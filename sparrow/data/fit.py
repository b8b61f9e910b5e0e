"""What a schema's values are fitted with: one pass over the training part of a log."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sparrow.core.errors import UserError
from sparrow.data.read import Log, types_for
from sparrow.data.schema import Column, Schema, Table
from sparrow.data.transformed import labels, raw_column, times
from sparrow.features import Moments, as_ids, as_lists, as_numbers, hash_ids
from sparrow.features.hashing import mix
from sparrow.features.numeric import squash

PARTS = ("train", "valid", "test")

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Cutter:
    """Which part (an index into PARTS) each row belongs to.

    cuts: by time, the first times of valid and of test. sorted: the whole log is in time order.
    """

    schema: Schema
    cuts: tuple[int, int] = (0, 0)
    sorted: bool = True

    def parts(self, batch: pa.RecordBatch, row0: int) -> Int64s:
        """Part of each row, int64 [N]; row0: the log's row of the batch's first one."""
        split, time = self.schema.split, self.schema.role("time")
        if split.by == "time":
            assert time is not None
            t_N = times(raw_column(batch, time, self.schema.columns[time]), time, row0)
            return np.searchsorted(np.array(self.cuts, np.int64), t_N, side="right")
        seed = mix(np.array([split.seed % (1 << 64)], np.uint64))
        u_N = mix(seed ^ np.arange(row0, row0 + batch.num_rows, dtype=np.uint64)) / 2.0**64
        return np.searchsorted(np.array([1 - split.valid - split.test, 1 - split.test]), u_N, side="right")


def cutter(schema: Schema, log: Log) -> Cutter:
    """Find where in time valid and test begin, by reading the time column (8 bytes of memory per row)."""
    time, split = schema.role("time"), schema.split
    if split.by == "ratio":
        return Cutter(schema)
    if time is None:
        raise UserError("split.by: 'time' needs a column of kind time; declare one, or split by 'ratio'")
    column = schema.columns[time]
    chunks, row0 = [np.empty(0, np.int64)], 0
    for batch in log.batches({column.source or time: log.types[column.source or time]}):
        chunks.append(times(raw_column(batch, time, column), time, row0))
        row0 += batch.num_rows
    t_N = np.concatenate(chunks)
    in_order = bool((np.diff(t_N) >= 0).all())
    t_N.sort()

    def first(share: float) -> int:
        i = round(len(t_N) * (1 - share))
        return np.iinfo(np.int64).max if i >= len(t_N) else int(t_N[i])

    return Cutter(schema, (first(split.valid + split.test), first(split.test)), in_order)


class Distinct:
    """The distinct values of a stream of int64."""

    def __init__(self) -> None:
        self._base = np.empty(0, np.int64)
        self._new: list[Int64s] = []
        self._size = 0

    def add(self, values_N: Int64s) -> None:
        """Take in int64 [N]."""
        self._new.append(np.unique(values_N))
        self._size += len(self._new[-1])
        if self._size > 1_000_000 + len(self._base):  # rarely, so that the merges cost little in all
            self.values()

    def values(self) -> Int64s:
        """All so far, in order."""
        self._base = np.unique(np.concatenate([self._base, *self._new]))
        self._new, self._size = [], 0
        return self._base


@dataclass
class _Ids:
    """Distinct ids of one table: integers as such, text by its hash."""

    integers: Distinct = field(default_factory=Distinct)
    texts: Distinct = field(default_factory=Distinct)

    def add(self, ids: pa.Array) -> None:
        ids = ids.drop_null()
        if pa.types.is_integer(ids.type):
            self.integers.add(ids.to_numpy(zero_copy_only=False))
        else:
            self.texts.add(hash_ids(ids))

    def fitted(self, table: Table, name: str) -> Table:
        """The table with what it lacks."""
        integers, texts = self.integers.values(), self.texts.values()
        low, high = (int(integers[0]), int(integers[-1])) if len(integers) else (0, -1)
        distinct = len(integers) if not len(texts) else len(np.union1d(hash_ids(pa.array(integers)), texts))
        compact = len(integers) > 0 and not len(texts) and high - low + 1 <= 4 * distinct + 1000
        encoding = table.encoding or ("range" if compact and table.rows is None else "hash")
        table = replace(table, encoding=encoding, distinct=distinct if table.distinct is None else table.distinct)
        if encoding == "hash":
            return replace(table, rows=table.rows or max(16, 1 << (2 * distinct - 1).bit_length()))
        low, high = low if table.low is None else table.low, high if table.high is None else table.high
        if high < low:
            raise UserError(
                f"tables.{name}: no integers in training to number; use encoding 'hash', or give low and high"
            )
        if table.rows not in (None, high - low + 2):
            remedy = f"{low}..{high} needs {high - low + 2}; leave rows out"
            raise UserError(f"tables.{name}.rows: {table.rows} for encoding 'range', but {remedy}")
        return replace(table, low=low, high=high, rows=high - low + 2)


class Fitter:
    """Takes in a log's raw batches and gives the fitted schema; rows, positives: of train, valid and test."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self.rows, self.positives = np.zeros(3, np.int64), np.zeros(3, np.int64)
        self._moments = {name: Moments() for name in schema.dense}
        self._ids = {name: _Ids() for name, t in schema.tables.items() if None in (t.encoding, t.rows, t.distinct)}

    def add(self, batch: pa.RecordBatch, parts_N: Int64s, row0: int) -> None:
        """Take in a batch whose first row is the log's row `row0`; UserError for what does not fit its kind."""
        train_N = parts_N == 0
        for name, column in self.schema.columns.items():
            if column.kind == "ignore":
                continue
            raw = raw_column(batch, name, column)
            if column.kind == "label":
                y_N = labels(raw, name, column, training=True, row0=row0)
                self.rows += np.bincount(parts_N, minlength=3)
                self.positives += np.bincount(parts_N, y_N, minlength=3).astype(np.int64)
            elif column.kind == "numeric":
                self._moments[name].add(squash(as_numbers(raw, name, row0)[train_N], column.transform))
            elif column.table in self._ids:
                self._ids[column.table].add(_training_ids(raw, name, column, train_N, row0))

    def fitted(self) -> Schema:
        """The schema with what it lacked; UserError when the training part teaches nothing."""
        self._check_label()
        columns = {name: self._numeric(name, column) for name, column in self.schema.columns.items()}
        tables = {
            name: self._ids[name].fitted(table, name) if name in self._ids else table
            for name, table in self.schema.tables.items()
        }
        return replace(self.schema, columns=columns, tables=tables)

    def _check_label(self) -> None:
        rows, ones, total = int(self.rows[0]), int(self.positives[0]), int(self.rows.sum())
        split = self.schema.split
        if not rows:
            remedy = f"of {total} rows valid takes {split.valid} and test {split.test} by {split.by}; lower them"
            raise UserError(f"split: no row is left for training; {remedy}")
        if ones in (0, rows):
            which = f"all {total} rows" if int(self.positives.sum()) in (0, total) else f"all {rows} training rows"
            label = self.schema.role("label")
            remedy = "a model needs both outcomes; check the label's column and its `positive`"
            raise UserError(f"label {label!r}: {which} are {1 if ones else 0}; {remedy}")

    def _numeric(self, name: str, column: Column) -> Column:
        if column.kind != "numeric":
            return column
        moments = self._moments[name]
        if not moments.count:
            raise UserError(f"columns.{name}: missing in all {self.rows[0]} training rows; make it kind 'ignore'")
        transform = column.transform or "standard"
        if transform == "none":
            return replace(column, transform=transform)
        mean, std = column.mean, column.std
        return replace(
            column,
            transform=transform,
            mean=moments.mean if mean is None else mean,
            std=moments.std if std is None else std,
        )


def _training_ids(raw: pa.Array, name: str, column: Column, train_N: npt.NDArray[np.bool_], row0: int) -> pa.Array:
    if column.kind == "categorical":
        return as_ids(raw, name, lambda i: row0 + i).filter(pa.array(train_N))
    ids, offsets, _ = as_lists(raw, name, row0, column.max_length, column.separator)
    return ids.filter(pa.array(np.repeat(train_N, np.diff(offsets))))


def fit(schema: Schema, log: Log, cut: Cutter, told: Callable[[int], None]) -> Fitter:
    """Read the whole log once; told: called with the rows done after each batch."""
    fitter, row0 = Fitter(schema), 0
    for batch in log.batches(types_for(schema, log)):
        fitter.add(batch, cut.parts(batch, row0), row0)
        row0 += batch.num_rows
        told(row0)
    return fitter
