"""Which part each row belongs to, and what a schema's values are fitted with: one pass over typed rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sparrow.core.errors import UserError
from sparrow.data.schema import Column, Schema, Table
from sparrow.data.transformed import Transforms, hashes
from sparrow.features import Moments
from sparrow.features.hashing import mix
from sparrow.features.numeric import squash
from sparrow.features.quantile import Ordered, quantile_boundaries
from sparrow.features.vocabulary import EMPTY, Counts, Vocabulary

PARTS = ("train", "valid", "test")
LEFT_OUT = len(PARTS)  # what `Cutter.parts` says of training rows that `split.negatives` leaves out

COUNTED_IDS = 1 << 21  # ids that counting holds in memory, 16 bytes each, in all tables together
VOCABULARY_MOST = 5_000_000  # a larger one is made only for tables that ask for it; others are hashed

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Cutter:
    """Which part (an index into PARTS, or LEFT_OUT) each row belongs to.

    cuts: by time, the first times of valid and of test; by file, their first rows.
    """

    schema: Schema
    cuts: tuple[int, int] = (0, 0)

    def parts(self, batch: pa.RecordBatch, row0: int) -> Int64s:
        """Part of each typed row, int64 [N]; row0: the log's row of the batch's first one."""
        split, time = self.schema.split, self.schema.role("time")
        rows_N = np.arange(row0, row0 + batch.num_rows)
        if split.by == "ratio":
            shares = np.array([1 - split.valid - split.test, 1 - split.test])
            parts_N = np.searchsorted(shares, _uniform(split.seed, rows_N), side="right")
        else:
            by_N = rows_N if split.by == "file" else batch.column(str(time)).to_numpy()
            parts_N = np.searchsorted(np.array(self.cuts, np.int64), by_N, side="right")
        if split.negatives < 1:
            kept_N = _uniform(split.seed + 1, rows_N) < split.negatives
            negative_N = batch.column(self.schema.labels[0]).to_numpy() == 0
            parts_N = np.where((parts_N == 0) & negative_N & ~kept_N, LEFT_OUT, parts_N)
        return parts_N


def time_cuts(schema: Schema, times: Ordered) -> tuple[int, int]:
    """The first times of valid and of test."""

    def first(share: float) -> int:
        place = round(len(times) * (1 - share))
        return np.iinfo(np.int64).max if place >= len(times) else int(times.at([place])[0])

    return first(schema.split.valid + schema.split.test), first(schema.split.test)


def _uniform(seed: int, rows_N: Int64s) -> npt.NDArray[np.float64]:
    """A number in [0, 1) for each row, drawn from the seed."""
    start = mix(np.array([seed % (1 << 64)], np.uint64))
    return mix(start ^ rows_N.astype(np.uint64)) / 2.0**64


class _Ids:
    """The ids of one table in training."""

    def __init__(self, path: Path, memory: int) -> None:
        self.counts = Counts(path, memory)
        self.low, self.high, self.hashed = int(np.iinfo(np.int64).max), int(np.iinfo(np.int64).min), False

    def widen(self, low: int, high: int, hashed: bool) -> None:
        """There were integers of low..high, and perhaps others than integers."""
        self.low, self.high, self.hashed = min(self.low, low), max(self.high, high), self.hashed or hashed

    def add(self, coded: pa.DictionaryArray, train_M: Bools) -> None:
        """Take in those coded ids [M] that are of the training part."""
        distinct, places = coded.dictionary, coded.indices.filter(pa.array(train_M)).drop_null()
        counts_U = np.bincount(places.to_numpy(zero_copy_only=False), minlength=len(distinct))
        seen_U = np.flatnonzero(counts_U)
        if not len(seen_U):
            return
        if len(seen_U) < len(distinct):
            distinct, counts_U = distinct.take(pa.array(seen_U)), counts_U[seen_U]
        if distinct.type == pa.uint64():
            self.hashed = True
        else:
            values_U = distinct.to_numpy()
            self.widen(int(values_U.min()), int(values_U.max()), False)
        self.counts.add(hashes(distinct), counts_U)

    def fitted(self, name: str, table: Table, known: Vocabulary | None) -> tuple[Table, Vocabulary | None]:
        """The table with what it lacks, and its vocabulary. known: the one to grow."""
        encoding = table.encoding or ("hash" if table.rows else "range" if self._is_compact() else "vocabulary")
        if encoding == "vocabulary":
            min_count = table.min_count or 2
            made, distinct = (known or EMPTY).grown(self.counts, min_count)
            if table.encoding or made.rows <= VOCABULARY_MOST:
                fitted = replace(table, encoding=encoding, min_count=min_count, rows=made.rows, digest=made.digest)
                return replace(fitted, distinct=distinct), made
            encoding = "hash"
        distinct = self._distinct() if table.distinct is None or encoding == "range" else table.distinct
        if encoding == "range":
            return self._as_range(name, table, distinct), None
        rows = table.rows or max(16, 1 << (2 * distinct - 1).bit_length())
        return replace(table, encoding="hash", rows=rows, distinct=distinct), None

    def grown_range(self, table: Table) -> Table:
        """A range that reaches to the highest integer, unless that would leave most of it empty."""
        assert table.low is not None
        assert table.high is not None
        rows = self.high - table.low + 2
        if self.hashed or self.high <= table.high or rows > 4 * (table.high - table.low + self._distinct()) + 1000:
            return table
        return replace(table, high=self.high, rows=rows)

    def _distinct(self) -> int:
        return sum(len(hashes_U) for hashes_U, _ in self.counts.merged())

    def _is_compact(self) -> bool:
        return not self.hashed and self.low <= self.high < self.low + 4 * self._distinct() + 1000

    def _as_range(self, name: str, table: Table, distinct: int) -> Table:
        low = self.low if table.low is None else table.low
        high = self.high if table.high is None else table.high
        if high < low:
            remedy = "use encoding 'vocabulary' or 'hash', or give low and high"
            raise UserError(f"tables.{name}: no integers in training to number; {remedy}")
        if table.rows not in (None, high - low + 2):
            remedy = f"{low}..{high} needs {high - low + 2}; leave rows out"
            raise UserError(f"tables.{name}.rows: {table.rows} for encoding 'range', but {remedy}")
        kept = distinct if table.distinct is None else table.distinct
        return replace(table, encoding="range", low=low, high=high, rows=high - low + 2, distinct=kept)


class Fitter:
    """Takes in a log's typed rows and gives what was fitted on those that are for training, negatives left out apart.

    rows: of train, valid and test, int64 [3]; left_out: training rows left out; positives: int64 [3, labels].
    given: what is fitted stays, except that with `grow` vocabularies and ranges get the new ids behind the old ones.
    work: a folder for what memory should not hold. pool: its threads take a column each.
    """

    def __init__(self, given: Transforms, work: Path, *, grow: bool = False, pool: Executor | None = None) -> None:
        self.given, self.grow, self._map = given, grow, pool.map if pool else map
        schema = given.schema
        self.rows, self.left_out = np.zeros(3, np.int64), 0
        self.positives = np.zeros((3, len(schema.labels)), np.int64)
        self._moments = {name: Moments() for name in schema.dense}
        self._bucketed = {column.table for column in schema.columns.values() if column.quantiles}
        wanted = [name for name, table in schema.tables.items() if self._is_wanted(name, table)]
        memory = COUNTED_IDS // max(1, len(wanted))
        self._ids = {name: _Ids(work / f"ids-{i}", memory) for i, name in enumerate(wanted)}
        unfit = [n for n, c in schema.columns.items() if c.quantiles and c.boundaries is None]
        self._values = {name: Ordered(work / f"values-{i}", np.float64) for i, name in enumerate(unfit)}

    def add(self, batch: pa.RecordBatch, parts_N: Int64s) -> None:
        """Take in typed rows."""
        self.rows += np.bincount(parts_N, minlength=len(PARTS) + 1)[: len(PARTS)]
        self.left_out += int((parts_N == LEFT_OUT).sum())
        for t, name in enumerate(self.given.schema.labels):
            y_N = batch.column(name).to_numpy()
            self.positives[:, t] += np.bincount(parts_N, y_N, minlength=4)[:3].astype(np.int64)
        train_N = parts_N == 0
        if train_N.any():
            tasks = [partial(self._add_numbers, name) for name in (*self._moments, *self._values)]
            tasks += [partial(self._add_ids, table) for table in self._ids]
            list(self._map(lambda task: task(batch, train_N), tasks))

    def state(self) -> Iterator[tuple[str, str, Int64s, Int64s]]:
        """What was taken in, for another one's `absorb`: kind, column or table, and numbers of two sorts."""
        yield "rows", "", np.append(self.rows, self.left_out), self.positives.reshape(-1)
        for name, moments in self._moments.items():
            yield "moments", name, np.append(moments.count, _limbs(moments.total)), _limbs(moments.squares)
        for name, values in self._values.items():
            yield from (("values", name, run.view(np.int64), np.empty(0, np.int64)) for run in values.runs())
        for name, ids in self._ids.items():
            yield "range", name, np.array([ids.low, ids.high]), np.array([ids.hashed], np.int64)
            yield from (("ids", name, hashes, counts) for hashes, counts in ids.counts.merged())

    def absorb(self, kind: str, name: str, a: Int64s, b: Int64s) -> None:
        """Take in an item of the `state` of a fitter of other rows; the order of items does not matter."""
        if kind == "rows":
            self.rows, self.left_out = self.rows + a[:-1], self.left_out + int(a[-1])
            self.positives = self.positives + b.reshape(self.positives.shape)
        elif kind == "moments":
            self._moments[name].merge(Moments(int(a[0]), _whole(a[1:]), _whole(b)))
        elif kind == "values":
            self._values[name].add(a.view(np.float64))
        elif kind == "range":
            self._ids[name].widen(int(a[0]), int(a[1]), bool(b[0]))
        else:
            self._ids[name].counts.add(a, b)

    def fitted(self) -> Transforms:
        """What was given with what it lacked; UserError when the training part teaches nothing."""
        self._check_labels()
        schema = self.given.schema
        columns = {name: self._column(name, column) for name, column in schema.columns.items()}
        found = dict(zip(self._ids, self._map(self._table, self._ids), strict=True))
        tables = schema.tables | {name: table for name, (table, _) in found.items()}
        tables |= {str(name): _of_buckets(columns, name) for name in self._bucketed}
        made = {name: vocabulary for name, (_, vocabulary) in found.items() if vocabulary is not None}
        vocabularies = {**self.given.vocabularies, **made}
        return Transforms(schema=replace(schema, columns=columns, tables=tables), vocabularies=vocabularies)

    def _is_wanted(self, name: str, table: Table) -> bool:
        if name in self._bucketed:
            return False
        if table.encoding == "vocabulary":
            return self.grow or name not in self.given.vocabularies
        return None in (table.encoding, table.rows, table.distinct) or (self.grow and table.encoding == "range")

    def _add_numbers(self, name: str, batch: pa.RecordBatch, train_N: Bools) -> None:
        x_N = batch.column(name).to_numpy()[train_N]
        if name in self._moments:
            self._moments[name].add(squash(x_N, self.given.schema.columns[name].transform))
        else:
            self._values[name].add(x_N[~np.isnan(x_N)] + 0.0)  # -0 becomes 0

    def _add_ids(self, table: str, batch: pa.RecordBatch, train_N: Bools) -> None:
        for name, column in self.given.schema.columns.items():
            if column.table != table:
                continue
            values = batch.column(name)
            if column.kind == "list":
                self._ids[table].add(values.flatten(), np.repeat(train_N, values.value_lengths().to_numpy()))
            else:
                self._ids[table].add(values, train_N)

    def _table(self, name: str) -> tuple[Table, Vocabulary | None]:
        table = self.given.schema.tables[name]
        if self.grow and table.encoding == "range" and None not in (table.low, table.high, table.rows):
            return self._ids[name].grown_range(table), None
        return self._ids[name].fitted(name, table, self.given.vocabularies.get(name))

    def _check_labels(self) -> None:
        rows, total, split = int(self.rows[0]), int(self.rows.sum()), self.given.schema.split
        if not rows:
            takes = f"valid takes {split.valid} and test {split.test} by {split.by}; lower them"
            if split.by == "file":
                takes = "those of valid_files and test_files take all; name others for training"
            raise UserError(f"split: no row is left for training; of {total} rows {takes}")
        for t, label in enumerate(self.given.schema.labels):
            ones = int(self.positives[0, t])
            if ones in (0, rows):
                everywhere = int(self.positives[:, t].sum()) in (0, total)
                which = f"all {total} rows" if everywhere else f"all {rows} training rows"
                remedy = "a model needs both outcomes; check the label's column and its `positive`"
                raise UserError(f"label {label!r}: {which} are {1 if ones else 0}; {remedy}")

    def _column(self, name: str, column: Column) -> Column:
        is_fitted = column.boundaries is not None or None not in (column.mean, column.std)
        numbers = len(self._values[name]) if name in self._values else None
        if column.kind == "numeric":
            numbers = self._moments[name].count
        if numbers == 0 and not is_fitted:
            raise UserError(f"columns.{name}: missing in all {self.rows[0]} training rows; make it kind 'ignore'")
        if name in self._values:
            assert column.quantiles is not None
            return replace(column, boundaries=quantile_boundaries(self._values[name], column.quantiles))
        if column.kind != "numeric" or column.transform == "none":
            return column
        moments, mean, std = self._moments[name], column.mean, column.std
        return replace(
            column,
            transform=column.transform or "standard",
            mean=moments.mean if mean is None else mean,
            std=moments.std if std is None else std,
        )


def _limbs(x: int) -> Int64s:
    """An integer of any size as some of 64 bits."""
    return np.frombuffer(x.to_bytes(x.bit_length() // 64 * 8 + 8, "little", signed=True), np.int64)


def _whole(limbs: Int64s) -> int:
    return int.from_bytes(limbs.tobytes(), "little", signed=True)


def _of_buckets(columns: Mapping[str, Column], table: str | None) -> Table:
    """The table of columns that are cut into buckets: as many rows as the one with most needs."""
    most = 1 + max(len(column.boundaries or ()) for column in columns.values() if column.table == table)
    return Table(encoding="range", low=1, high=most, rows=most + 1, distinct=most)
