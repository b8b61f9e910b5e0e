"""Which part each row belongs to, and what a schema's values are fitted with: one pass over typed rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparrow.core.arrays import Bools, Float64s, Int64s
from sparrow.core.errors import UserError
from sparrow.data.batches.parts import PARTS
from sparrow.data.preparation.moments import order_of
from sparrow.features.encodings import BEFORE, FIRST, MIN_COUNT, Counts, Known, named
from sparrow.features.hashing import hashes_of, mix, row_hashes
from sparrow.features.numeric import Statistics, squash
from sparrow.features.quantile import Ordered, quantile_boundaries
from sparrow.features.schema import Column, Encoding, Schema, missing_of, number_name
from sparrow.features.transforms import Transforms
from sparrow.features.vectors import unpacked

LEFT_OUT = len(PARTS)  # what `Cutter.parts` says of training rows that `split.negatives` leaves out, and of later rows

COUNTED_IDS = 1 << 20  # entries that counting holds in memory, 32 bytes each, in all tables together


@dataclass(frozen=True, kw_only=True)
class Cutter:
    """Which part (an index into PARTS, or LEFT_OUT) each row belongs to.

    cuts: by time, the first times of valid, of test and, where the split has an `until`, of what is left out; by file,
    the first rows of valid and test. By ratio the part is a function of
    the seed and of the row's group, or session where no column is a group; a row without one has a part of its own.
    """

    schema: Schema
    cuts: tuple[int, ...] = (0, 0)

    def parts(self, batch: pa.RecordBatch, row0: int) -> Int64s:
        """Returns the part of each typed row, int64 [N]. row0: the log's row of the batch's first one."""
        split, time = self.schema.split, self.schema.role("time")
        rows_N = np.arange(row0, row0 + batch.num_rows)
        if split.by == "ratio":
            shares = np.array([1 - split.valid - split.test, 1 - split.test])
            parts_N = np.searchsorted(shares, _uniform(split.seed, self._keys(batch, row0)), side="right")
        else:
            by_N = rows_N if split.by == "file" else batch.column(str(time)).to_numpy()
            parts_N = np.searchsorted(np.array(self.cuts, np.int64), by_N, side="right")
        if split.negatives < 1:
            kept_N = _uniform(split.seed + 1, rows_N) < split.negatives
            negative_N = batch.column(self.schema.labels[0]).to_numpy() == 0
            parts_N = np.where((parts_N == 0) & negative_N & ~kept_N, LEFT_OUT, parts_N)
        return parts_N

    def order(self, batch: pa.RecordBatch, row0: int) -> Int64s:
        """Returns what says which typed rows are earlier than which, int64 [N].

        It is the time. A log without one has an order that is drawn from the seed, in which whole groups stand together
        as they do in a split by ratio.
        """
        if time := self.schema.role("time"):
            return batch.column(time).to_numpy()
        drawn_N: Int64s = (_uniform(self.schema.split.seed + 2, self._keys(batch, row0)) * 2.0**62).astype(np.int64)
        return drawn_N

    def _keys(self, batch: pa.RecordBatch, row0: int) -> Int64s:
        """What is drawn by: the id of each row in the split's key, group or session, else the row."""
        rows_N, whole = np.arange(row0, row0 + batch.num_rows), self.schema.split_key
        if whole is None:
            return rows_N
        ids = batch.column(whole)
        coded = pa.types.is_dictionary(ids.type)
        ids_N = row_hashes(ids) if coded else ids.to_numpy()  # above 0 where there is one
        return np.where(ids_N > 0, ids_N, rows_N)


def time_cuts(schema: Schema, times: Ordered) -> tuple[int, ...]:
    """Returns the first times of valid and of test, and of what is left out where there is such."""

    def first(share: float) -> int:
        place = round(len(times) * (1 - share))
        return np.iinfo(np.int64).max if place >= len(times) else int(times.at([place])[0])

    split, later = schema.split, 1 - (schema.split.until or 1)
    cuts = first(split.valid + split.test + later), first(split.test + later)
    return (*cuts, first(later)) if later else cuts


def _uniform(seed: int, keys_N: Int64s) -> Float64s:
    """Returns a number in [0, 1) for each row or group, drawn from the seed."""
    start = mix(np.array([seed % (1 << 64)], np.uint64))
    return mix(start ^ keys_N.astype(np.uint64)) / 2.0**64


@dataclass(frozen=True, kw_only=True, eq=False)
class Fitted:
    """What was fitted.

    since: table -> the moments after which its table rows are known in training, int64 [2, rows]. A table whose ids are
    known from the start is left out.
    """

    transforms: Transforms
    since: Mapping[str, Int64s]


class _Ids:
    """The ids of one table in training."""

    def __init__(self, path: Path, table: Encoding, memory: int) -> None:
        is_counted = table.kind is None or table.is_numbered
        needed = (table.min_count or MIN_COUNT) - 1 if is_counted else 0
        self.counts = Counts(path, needed, memory)
        self.low = int(np.iinfo(np.int64).max)
        self.high = int(np.iinfo(np.int64).min)
        self.hashed = False

    def widen(self, low: int, high: int, hashed: bool) -> None:
        """There were integers of low..high, and perhaps others than integers."""
        self.low = min(self.low, low)
        self.high = max(self.high, high)
        self.hashed = self.hashed or hashed

    def add(self, coded: pa.DictionaryArray, ordinal_M: Int64s, moments_2O: Int64s) -> None:
        """Take in coded ids [M]. ordinal_M: the places of their moments, -1 for rows that are not for training."""
        train_M = pc.and_(pa.array(ordinal_M >= 0), coded.is_valid())
        code_M = coded.indices.filter(train_M).to_numpy()
        if not len(code_M):
            return
        ordinal_M = ordinal_M[train_M.to_numpy(zero_copy_only=False)]
        code_E, ordinal_E, count_E = _entries(code_M, ordinal_M, self.counts.needed)
        seen_U, code_E = np.unique(code_E, return_inverse=True)
        distinct = coded.dictionary.take(pa.array(seen_U))
        if distinct.type == pa.uint64():
            self.hashed = True
        else:
            values_U = distinct.to_numpy()
            self.widen(int(values_U.min()), int(values_U.max()), False)
        self.counts.add(np.stack([hashes_of(distinct)[code_E], *moments_2O[:, ordinal_E], count_E]))

    def fitted(
        self, name: str, encoding: Encoding, known: Known | None
    ) -> tuple[Encoding, Known | None, Int64s | None]:
        """The encoding with what it lacks, which ids it knows, and since when. known: what is to be grown."""
        kind = encoding.kind or ("hash" if encoding.rows else "range" if self._is_compact() else "vocabulary")
        made = named(kind).fitted(name, encoding, self, known) or named("hash").fitted(name, encoding, self, None)
        assert made is not None
        return made

    def distinct(self) -> int:
        """How many ids there are."""
        return sum(int(seen.today_U.sum()) for seen in self.counts.seen())

    def _is_compact(self) -> bool:
        return not self.hashed and self.low <= self.high < self.low + 4 * self.distinct() + 1000


class Fitter:
    """Takes in a log's typed rows, and fits on those that are for training. Negatives that are left out do not count.

    given: what is fitted stays. With `grow`, vocabularies and ranges get the new ids after the old ones. work: a folder
    for what memory should not hold. pool: its threads take a column each. rows: of train, valid and test, int64 [3].
    left_out: rows of no part. positives, labelled: rows where a label is 1, and where it is known, int64 [3, labels].
    """

    def __init__(self, given: Transforms, work: Path, *, grow: bool = False, pool: Executor | None = None) -> None:
        self.given = given
        self.grow = grow
        self._map = pool.map if pool else map
        schema = given.schema
        self.rows = np.zeros(3, np.int64)
        self.left_out = 0
        self.positives = np.zeros((3, len(schema.labels)), np.int64)
        self.labelled = np.zeros_like(self.positives)
        # of training: the weights of rows where a label is known, and of those where it is one
        names = [(name, is_one) for name in schema.labels for is_one in (False, True)]
        self._weights = {_weights_of(*one): Statistics() for one in names} if schema.role("weight") else {}
        marks = [name for name, column in schema.columns.items() if column.transform == "missing"]
        self._statistics = {name: Statistics() for name in schema.numbers if name not in marks}
        self._bucketed = {column.table for column in schema.columns.values() if column.quantiles}
        wanted = [name for name, table in schema.encodings.items() if self._is_wanted(name, table)]
        memory = COUNTED_IDS // max(1, len(wanted))
        self._ids = {name: _Ids(work / f"ids-{i}", schema.encodings[name], memory) for i, name in enumerate(wanted)}
        for name, known in given.vocabularies.items():
            for rare in known.rare() if name in self._ids else ():
                self._ids[name].counts.remember(*rare)
        unfit = [n for n, c in schema.columns.items() if c.quantiles and c.boundaries is None]
        self._values = {name: Ordered(work / f"values-{i}", np.float64) for i, name in enumerate(unfit)}

    def add(self, batch: pa.RecordBatch, parts_N: Int64s, moments_2N: Int64s) -> None:
        """Takes in typed rows.

        Args:
            batch: the rows.
            parts_N: the part of each.
            moments_2N: the time and the place of each one's moment.
        """
        self.rows += np.bincount(parts_N, minlength=len(PARTS) + 1)[: len(PARTS)]
        self.left_out += int((parts_N == LEFT_OUT).sum())
        for t, name in enumerate(self.given.schema.labels):
            y_N = batch.column(name).to_numpy()
            self.positives[:, t] += np.bincount(parts_N[y_N == 1], minlength=4)[:3]
            self.labelled[:, t] += np.bincount(parts_N[~np.isnan(y_N)], minlength=4)[:3]
        train_N = parts_N == 0
        if train_N.any():
            moments_2O, ordinal_N = order_of(moments_2N)
            ordinal_N = np.where(train_N, ordinal_N, -1)
            numeric = [name for name in self._statistics if name in self.given.schema.columns]
            tasks = [partial(self._add_numbers, name, batch, train_N) for name in (*numeric, *self._values)]
            vectors = self.given.schema.of_kind("vector")
            tasks += [partial(self._add_vectors, name, batch, train_N) for name in vectors]
            labels = self.given.schema.labels if self._weights else ()
            tasks += [partial(self._add_weights, label, batch, train_N) for label in labels]
            tasks += [partial(self._add_ids, table, batch, ordinal_N, moments_2O) for table in self._ids]
            list(self._map(lambda task: task(), tasks))

    def state(self) -> Iterator[tuple[str, str, Int64s, Int64s]]:
        """Yields what was taken in, for another one's `absorb`: kind, column or table, and numbers of two sorts."""
        yield "rows", "", np.append(self.rows, self.left_out), np.stack([self.positives, self.labelled]).reshape(-1)
        for kind, found in (("statistics", self._statistics), ("weights", self._weights)):
            for name, moments in found.items():
                limits = np.array([moments.low, moments.high]).view(np.int64)
                yield kind, name, np.array([moments.count, *limits, *_limbs(moments.total)]), _limbs(moments.squares)
        for name, values in self._values.items():
            yield from (("values", name, run.view(np.int64), np.empty(0, np.int64)) for run in values.runs())
        for name, ids in self._ids.items():
            yield "range", name, np.array([ids.low, ids.high]), np.array([ids.hashed], np.int64)
            yield from (("ids", name, entries[0], entries[1:].reshape(-1)) for entries in ids.counts.merged())

    def absorb(self, kind: str, name: str, a: Int64s, b: Int64s) -> None:
        """Takes in an item of the `state` of a fitter of other rows. The order of items does not matter."""
        if kind == "rows":
            self.rows = self.rows + a[:-1]
            self.left_out = self.left_out + int(a[-1])
            positives, labelled = b.reshape(2, *self.positives.shape)
            self.positives, self.labelled = self.positives + positives, self.labelled + labelled
        elif kind in ("statistics", "weights"):
            found = self._statistics if kind == "statistics" else self._weights
            found[name].merge(Statistics(int(a[0]), _whole(a[3:]), _whole(b), *a[1:3].view(np.float64).tolist()))
        elif kind == "values":
            self._values[name].add(a.view(np.float64))
        elif kind == "range":
            self._ids[name].widen(int(a[0]), int(a[1]), bool(b[0]))
        else:
            self._ids[name].counts.add(np.vstack([a, b.reshape(3, -1)]))

    def base_rates(self) -> dict[str, float]:
        """Returns each label's share of ones among the training rows that have it, by their weights if any is not 0."""
        rates = {}
        for t, label in enumerate(self.given.schema.labels):
            ones, whole = int(self.positives[0, t]), int(self.labelled[0, t])
            if self._weights and self._weights[_weights_of(label, False)].total:
                ones, whole = (self._weights[_weights_of(label, is_one)].total for is_one in (True, False))
            rates[label] = float(Fraction(ones, whole))
        return rates

    def fitted(self) -> Fitted:
        """Returns what was given, with what it lacked.

        Raises:
            UserError: when the training part teaches nothing.
        """
        self._check_labels()
        schema = self.given.schema
        columns, groups = self._columns()
        found = dict(zip(self._ids, self._map(self._table, self._ids), strict=True))
        tables = schema.encodings | {name: encoding for name, (encoding, *_) in found.items()}
        tables |= {str(name): _of_buckets(columns, name) for name in self._bucketed}
        made = {
            name: (known, since) for name, (_, known, since) in found.items() if known is not None and since is not None
        }
        vocabularies = {
            **self.given.vocabularies,
            **{name: known for name, (known, _) in made.items() if known is not None},
        }
        schema = replace(schema, columns=columns, encodings=tables, groups=groups)
        since = {name: since_2R for name, (_, since_2R) in made.items() if (since_2R > BEFORE).any()}
        transforms = Transforms(schema=schema, vocabularies=vocabularies, counts=self.given.counts)
        return Fitted(transforms=transforms, since=since)

    def _is_wanted(self, name: str, table: Encoding) -> bool:
        if name in self._bucketed:
            return False
        if table.kind is not None and not table.is_numbered:
            return None in (table.rows, table.distinct)
        return self.grow or name not in self.given.vocabularies

    def _add_numbers(self, name: str, batch: pa.RecordBatch, train_N: Bools) -> None:
        x_N = batch.column(name).to_numpy()[train_N]
        if name in self._statistics:
            self._statistics[name].add(squash(x_N, self.given.schema.columns[name].transform))
            self._statistics[name].widen(x_N)
        else:
            self._values[name].add(x_N[~np.isnan(x_N)] + 0.0)  # -0 becomes 0

    def _add_vectors(self, name: str, batch: pa.RecordBatch, train_N: Bools) -> None:
        column = self.given.schema.columns[name]
        is_given = column.transform == "none" or None not in (column.means, column.stds)
        x_NS = unpacked(batch.column(name).filter(pa.array(train_N)).drop_null())
        for i in range(1 if is_given else column.width):  # the first number counts the rows that have a vector
            self._statistics[number_name(name, i)].add(squash(x_NS[:, i].astype(np.float64), column.transform))

    def _add_weights(self, label: str, batch: pa.RecordBatch, train_N: Bools) -> None:
        w_N = batch.column(str(self.given.schema.role("weight"))).to_numpy().astype(np.float64)
        y_N = batch.column(label).to_numpy()
        self._weights[_weights_of(label, False)].add(w_N[train_N & ~np.isnan(y_N)])
        self._weights[_weights_of(label, True)].add(w_N[train_N & (y_N == 1)])

    def _add_ids(self, table: str, batch: pa.RecordBatch, ordinal_N: Int64s, moments_2O: Int64s) -> None:
        for name, column in self.given.schema.columns.items():
            if column.table != table:
                continue
            values = batch.column(name)
            if column.kind == "list":
                ordinal_M = np.repeat(ordinal_N, values.value_lengths().to_numpy())
                self._ids[table].add(values.flatten(), ordinal_M, moments_2O)
            else:
                self._ids[table].add(values, ordinal_N, moments_2O)

    def _table(self, name: str) -> tuple[Encoding, Known | None, Int64s | None]:
        return self._ids[name].fitted(name, self.given.schema.encodings[name], self.given.vocabularies.get(name))

    def _check_labels(self) -> None:
        rows = int(self.rows[0])
        total = int(self.rows.sum())
        split = self.given.schema.split
        if not rows:
            takes = f"valid takes {split.valid} and test {split.test} by {split.by}; lower them"
            if split.by == "file":
                takes = "those of valid_files and test_files take all; name others for training"
            raise UserError(f"split: no row is left for training; of {total} rows {takes}")
        for t, label in enumerate(self.given.schema.labels):
            ones, known = int(self.positives[0, t]), int(self.labelled[0, t])
            if not known:
                raise UserError(f"label {label!r}: missing in all {rows} training rows; leave the column out")
            if ones in (0, known):
                everywhere = int(self.positives[:, t].sum()) in (0, int(self.labelled[:, t].sum()))
                which = f"all {int(self.labelled[:, t].sum())} rows" if everywhere else f"all {known} training rows"
                remedy = "a model needs both outcomes; check the label's column and its `positive`"
                raise UserError(f"label {label!r}: {which} are {1 if ones else 0}; {remedy}")

    def _columns(self) -> tuple[dict[str, Column], dict[str, tuple[str, ...]]]:
        """All columns, each numeric one that is fitted and has missing values with one beside it that tells where."""
        columns: dict[str, Column] = {}
        groups = dict(self.given.schema.groups)
        for name, column in self.given.schema.columns.items():
            columns[name] = self._column(name, column)
            beside = missing_of(name)
            fitted = column.mean if column.counts else column.low
            is_new = fitted is None and column.means is None and column.transform != "none"
            counted = self._counted(name, column)
            is_marked = is_new and counted is not None and counted.count < self.rows[0]
            source = column.source or name
            is_told = bool(column.counts) and any(
                of.counts and of.source == source and missing_of(other) in columns for other, of in columns.items()
            )
            if is_marked and not is_told and beside not in self.given.schema.columns:
                columns[beside] = Column(kind="numeric", source=source, missing=column.missing, transform="missing")
                for group, names in groups.items():
                    groups[group] = (*names, beside) if name in names else names
        return columns, groups

    def _counted(self, name: str, column: Column) -> Statistics | None:
        """Returns what counts the numbers, or the vectors, of a column."""
        return self._statistics.get(number_name(name, 0) if column.kind == "vector" else name)

    def _vector(self, name: str, column: Column) -> Column:
        if column.transform == "none":
            return column
        each = [self._statistics[number_name(name, i)] for i in range(column.width)]
        return replace(
            column,
            transform=column.transform or "standard",
            means=column.means or tuple(one.mean for one in each),
            stds=column.stds or tuple(one.std for one in each),
        )

    def _column(self, name: str, column: Column) -> Column:
        is_fitted = column.boundaries is not None or None not in (column.mean, column.std) or column.means is not None
        numbers = len(self._values[name]) if name in self._values else None
        counted = self._counted(name, column)
        if counted is not None:
            numbers = counted.count
        if numbers == 0 and not is_fitted:
            raise UserError(f"columns.{name}: missing in all {self.rows[0]} training rows; make it kind 'ignore'")
        if name in self._values:
            assert column.quantiles is not None
            return replace(column, boundaries=quantile_boundaries(self._values[name], column.quantiles))
        if column.kind == "vector":
            return self._vector(name, column)
        if name not in self._statistics:
            return column
        moments = self._statistics[name]
        mean = column.mean
        std = column.std
        if column.transform == "none":
            return column
        if column.low is None and column.high is None and numbers and not column.counts:  # counts go on from day to day
            column = replace(column, low=moments.low, high=moments.high)
        return replace(
            column,
            transform=column.transform or "standard",
            mean=moments.mean if mean is None else mean,
            std=moments.std if std is None else std,
        )


def _entries(code_M: Int64s, ordinal_M: Int64s, needed: int) -> tuple[Int64s, Int64s, Int64s]:
    """Codes, moments and counts [E] of occurrences: each id's first moments, until there are `needed`, and the last."""
    size, entries = int(code_M.max()) + 1, list[Int64s]()
    have_U = np.zeros(size, np.int64)
    while len(code_M):
        late_M = have_U[code_M] >= needed
        if late_M.any():  # all that is left of these ids
            code, last_U = code_M[late_M], np.full(size, -1)
            np.maximum.at(last_U, code, ordinal_M[late_M])
            seen = np.flatnonzero(last_U >= 0)
            entries.append(np.stack([seen, last_U[seen], np.bincount(code, minlength=size)[seen]]))
            code_M, ordinal_M = code_M[~late_M], ordinal_M[~late_M]
        first_U = np.full(size, np.iinfo(np.int64).max)
        np.minimum.at(first_U, code_M, ordinal_M)
        at_M = ordinal_M == first_U[code_M]
        count_U = np.bincount(code_M[at_M], minlength=size)
        seen = np.flatnonzero(count_U)
        entries.append(np.stack([seen, first_U[seen], count_U[seen]]))
        have_U += count_U
        code_M, ordinal_M = code_M[~at_M], ordinal_M[~at_M]
    code_E, ordinal_E, count_E = np.concatenate(entries, axis=1)
    return code_E, ordinal_E, count_E


def _weights_of(label: str, is_one: bool) -> str:
    """Returns the name of what is counted of the weights of rows that have a label."""
    return f"{label}:{'ones' if is_one else 'known'}"


def _limbs(x: int) -> Int64s:
    """An integer of any size as some of 64 bits."""
    return np.frombuffer(x.to_bytes(x.bit_length() // 64 * 8 + 8, "little", signed=True), np.int64)


def _whole(limbs: Int64s) -> int:
    return int.from_bytes(limbs.tobytes(), "little", signed=True)


def _of_buckets(columns: Mapping[str, Column], table: str | None) -> Encoding:
    """The table of columns that are cut into buckets: as many rows as the one with most needs."""
    most = 1 + max(len(column.boundaries or ()) for column in columns.values() if column.table == table)
    return Encoding(kind="range", low=1, high=most, rows=most + FIRST, distinct=most)
