"""What a schema's values are fitted with: one pass over typed rows."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparrow import features
from sparrow.core.arrays import Bools, Int64s
from sparrow.core.errors import UserError
from sparrow.data import preparation
from sparrow.data.batches.parts import PARTS
from sparrow.data.preparation.cutter import LEFT_OUT
from sparrow.data.preparation.moments import order_of
from sparrow.features.encodings import BEFORE, FIRST, MIN_COUNT, Counts, Known, load_kind
from sparrow.features.encodings.range import Range
from sparrow.features.hashing import hashes_of
from sparrow.features.numeric import Statistics, squash
from sparrow.features.schema import Column, Encoding, missing_of, number_name
from sparrow.features.transforms import Transforms

# entries that counting holds in memory, 32 bytes each, in all tables together
COUNTED_IDS = 1 << 20


@dataclass(frozen=True, kw_only=True, eq=False)
class Fitted:
    """What was fitted.

    since: table -> the moments after which its table rows are known in training, int64 [2, rows]. A
    table whose ids are known from the start is left out.
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
        """Take in coded ids [M]. ordinal_M: the places of their moments, -1 for rows that are not
        for training.
        """
        train_M = pc.and_(pa.array(ordinal_M >= 0), coded.is_valid())
        code_M = coded.indices.filter(train_M).to_numpy()
        if not len(code_M):
            return
        ordinal_M = ordinal_M[train_M.to_numpy(zero_copy_only=False)]
        code_E, ordinal_E, count_E = _entries(code_M, ordinal_M, self.counts.needed)
        code_U, code_E = np.unique(code_E, return_inverse=True)
        distinct = coded.dictionary.take(pa.array(code_U))
        if distinct.type == pa.uint64():
            self.hashed = True
        else:
            values_U = distinct.to_numpy()
            self.widen(int(values_U.min()), int(values_U.max()), False)
        self.counts.add(np.stack([hashes_of(distinct)[code_E], *moments_2O[:, ordinal_E], count_E]))

    def fit_encoding(
        self, name: str, encoding: Encoding, known: Known | None
    ) -> tuple[Encoding, Known | None, Int64s | None]:
        """The encoding with what it lacks, which ids it knows, and since when. known: what is to be
        grown.
        """
        kind = encoding.kind
        if kind is None and encoding.rows:
            kind = "hash"
        elif kind is None:
            kind = "range" if self._is_compact() else "vocabulary"
        fitted = load_kind(kind).fit(name, encoding, self, known)
        if fitted is None:
            fitted = load_kind("hash").fit(name, encoding, self, None)
        assert fitted is not None
        return fitted

    def distinct(self) -> int:
        """How many ids there are."""
        return sum(int(batch.today_U.sum()) for batch in self.counts.distinct_ids())

    def _is_compact(self) -> bool:
        return not self.hashed and self.low <= self.high < self.low + 4 * self.distinct() + 1000


class Fitter:
    """Takes in a log's typed rows, and fits on those that are for training. Negatives that are left
    out do not count.

    given: what is fitted stays. With `grow`, vocabularies and ranges get the new ids after the old
    ones. addition: whether a model knows earlier rows, so that these need not have both outcomes.
    work: a folder for what memory should not hold. pool: its threads take a column each. rows: of
    train, valid and test, int64 [3].
    left_out: rows of no part; empty: those that stand for no impression. statistics: of the numbers
    of each column; sums: of weights; values: of columns that are cut into buckets; ids: of each
    table. positives, labelled: rows where a label is 1, and where it is known, int64 [3, labels].
    """

    def __init__(
        self,
        initial: Transforms,
        work: Path,
        *,
        grow: bool = False,
        addition: bool = False,
        pool: Executor | None = None,
    ) -> None:
        self.initial = initial
        self.grow = grow
        self._addition = addition
        self._map = pool.map if pool else map
        schema = initial.schema
        self.rows = np.zeros(3, np.int64)
        self.left_out = self.empty = 0
        self.positives = np.zeros((3, len(schema.labels)), np.int64)
        self.labelled = np.zeros_like(self.positives)
        is_weighed = schema.weights or any(schema.is_share(label) for label in schema.labels)
        self.sums = preparation.weights.WeightSums(schema) if is_weighed else None
        marks = [name for name, column in schema.columns.items() if column.transform == "missing"]
        self.statistics = {name: Statistics() for name in schema.numbers if name not in marks}
        self._bucketed = {column.table for column in schema.columns.values() if column.quantiles}
        wanted = [name for name, table in schema.encodings.items() if self._is_wanted(name, table)]
        memory = COUNTED_IDS // max(1, len(wanted))
        self.ids = {
            name: _Ids(work / f"ids-{i}", schema.encodings[name], memory)
            for i, name in enumerate(wanted)
        }
        for name, known in initial.vocabularies.items():
            for rare in known.rare() if name in self.ids else ():
                self.ids[name].counts.remember(*rare)
        unfit = [n for n, c in schema.columns.items() if c.quantiles and c.boundaries is None]
        self.values = {
            name: features.quantile.Ordered(work / f"values-{i}", np.float64)
            for i, name in enumerate(unfit)
        }

    def add(self, batch: pa.RecordBatch, parts_N: Int64s, moments_2N: Int64s) -> None:
        """Takes in typed rows.

        Args:
            batch: the rows.
            parts_N: the part of each.
            moments_2N: the time and the place of each one's moment.
        """
        self.rows += np.bincount(parts_N, minlength=len(PARTS) + 1)[: len(PARTS)]
        self.left_out += int((parts_N == LEFT_OUT).sum())
        if impressions := self.initial.schema.role("impressions"):
            self.empty += int((batch.column(impressions).to_numpy() == 0).sum())
        for t, name in enumerate(self.initial.schema.labels):
            y_N = batch.column(name).to_numpy()
            self.positives[:, t] += np.bincount(parts_N[y_N == 1], minlength=4)[:3]
            self.labelled[:, t] += np.bincount(parts_N[~np.isnan(y_N)], minlength=4)[:3]
        tasks = self.sums.tasks(batch, parts_N) if self.sums else []
        train_N = parts_N == 0
        if train_N.any():
            moments_2O, ordinal_N = order_of(moments_2N)
            ordinal_N = np.where(train_N, ordinal_N, -1)
            numeric = [name for name in self.statistics if name in self.initial.schema.columns]
            tasks += [
                partial(self._add_numbers, name, batch, train_N)
                for name in (*numeric, *self.values)
            ]
            vectors = self.initial.schema.of_kind("vector")
            tasks += [partial(self._add_vectors, name, batch, train_N) for name in vectors]
            tasks += [
                partial(self._add_ids, table, batch, ordinal_N, moments_2O) for table in self.ids
            ]
        list(self._map(lambda task: task(), tasks))

    def base_rates(self) -> dict[str, float]:
        """Returns each label's share of ones among the training rows that have it, by their weights
        if any is not 0.
        """
        rates = {}
        for t, label in enumerate(self.initial.schema.labels):
            positives, known = (self.sums and self.sums.weights(label)) or self.counts(0, t)
            rates[label] = float(Fraction(positives, known))
        return rates

    def counts(self, part: int, label: int) -> tuple[int, int]:
        """Returns how many of a part's rows are ones of a label, and how many have it.

        Of a label that is a share of a row these are sums over impressions (of each row 1 where
        there are none), in units of their own.
        """
        shown = self.sums and self.sums.impressions(PARTS[part], self.initial.schema.labels[label])
        return shown or (int(self.positives[part, label]), int(self.labelled[part, label]))

    def impressions(self) -> dict[str, float]:
        """Returns how many impressions each label has in training; nothing where rows do not stand
        for some.
        """
        return self.sums.shown() if self.sums else {}

    def fitted(self) -> Fitted:
        """Returns what was given, with what it lacked.

        Raises:
            UserError: when the training part teaches nothing.
        """
        self._check_labels()
        schema = self.initial.schema
        columns, groups = self._columns()
        encodings = dict(schema.encodings)
        vocabularies = dict(self.initial.vocabularies)
        since: dict[str, Int64s] = {}
        tables = self._map(self._table, self.ids)
        for name, (encoding, known, since_2R) in zip(self.ids, tables, strict=True):
            encodings[name] = encoding
            if known is not None and since_2R is not None:
                vocabularies[name] = known
                if (since_2R > BEFORE).any():
                    since[name] = since_2R
        encodings |= {str(name): _bucket_encoding(columns, name) for name in self._bucketed}
        schema = replace(schema, columns=columns, encodings=encodings, groups=groups)
        transforms = Transforms(
            schema=schema, vocabularies=vocabularies, counts=self.initial.counts
        )
        return Fitted(transforms=transforms, since=since)

    def _is_wanted(self, name: str, table: Encoding) -> bool:
        if name in self._bucketed:
            return False
        if table.kind is not None and not table.is_numbered:
            return None in (table.rows, table.distinct)
        return self.grow or name not in self.initial.vocabularies

    def _add_numbers(self, name: str, batch: pa.RecordBatch, train_N: Bools) -> None:
        x_N = batch.column(name).to_numpy()[train_N]
        if name in self.statistics:
            self.statistics[name].add(squash(x_N, self.initial.schema.columns[name].transform))
            self.statistics[name].widen(x_N)
        else:
            self.values[name].add(x_N[~np.isnan(x_N)] + 0.0)  # -0 becomes 0

    def _add_vectors(self, name: str, batch: pa.RecordBatch, train_N: Bools) -> None:
        column = self.initial.schema.columns[name]
        is_given = column.transform == "none" or None not in (column.means, column.stds)
        x_NS = features.vectors.unpacked(batch.column(name).filter(pa.array(train_N)).drop_null())
        # the first number counts the rows that have a vector
        for i in range(1 if is_given else column.width):
            self.statistics[number_name(name, i)].add(
                squash(x_NS[:, i].astype(np.float64), column.transform)
            )

    def _add_ids(
        self, table: str, batch: pa.RecordBatch, ordinal_N: Int64s, moments_2O: Int64s
    ) -> None:
        for name, column in self.initial.schema.columns.items():
            if column.table != table:
                continue
            values = batch.column(name)
            if column.kind == "list":
                ordinal_M = np.repeat(ordinal_N, values.value_lengths().to_numpy())
                self.ids[table].add(values.flatten(), ordinal_M, moments_2O)
            else:
                self.ids[table].add(values, ordinal_N, moments_2O)

    def _table(self, name: str) -> tuple[Encoding, Known | None, Int64s | None]:
        encoding, known = self.initial.schema.encodings[name], self.initial.vocabularies.get(name)
        part = self.initial.schema.parts.get(name)
        if part is None or encoding.kind not in (None, "range"):
            return self.ids[name].fit_encoding(name, encoding, known)
        low, high = features.times.VALUES_OF_PART[part]
        low = low if encoding.low is None else encoding.low
        high = high if encoding.high is None else encoding.high
        complete = replace(encoding, kind="range", low=low, high=high)
        encoding, known, since_2R = self.ids[name].fit_encoding(name, complete, known)
        assert isinstance(known, Range)
        # a value that can come need not be seen first
        return encoding, known.with_all_known(), np.full_like(since_2R, BEFORE)

    def _check_labels(self) -> None:
        rows = int(self.rows[0])
        total = int(self.rows.sum())
        split = self.initial.schema.split
        if not total + self.left_out:
            raise UserError("inputs: the log has no rows; leave it out, or name files with rows")
        if not rows:
            takes = f"valid takes {split.valid} and test {split.test} by {split.by}"
            takes += "; ask for none (--valid 0 --test 0), or name more rows"
            if self.left_out and split.negatives < 1:
                takes = (
                    f"negatives {split.negatives} leaves out those of training; keep more of them"
                )
            elif split.by == "file":
                takes = "those of valid_files and test_files take all; name others for training"
            raise UserError(f"split: no row is left for training; of {total} rows {takes}")
        for t, label in enumerate(self.initial.schema.labels):
            parts = [self.counts(part, t) for part in range(len(PARTS))]
            positives, known = parts[0]
            labelled = self.labelled[:, t]
            if not labelled[0]:
                raise UserError(
                    f"label {label!r}: missing in all {rows} training rows; leave the column out"
                )
            if positives in (0, known) and not self._addition:
                everywhere = sum(part[0] for part in parts) in (0, sum(part[1] for part in parts))
                rows_meant = f"{int(labelled[0])} training rows"
                if everywhere:
                    rows_meant = f"{int(labelled.sum())} rows"
                outcome = 1 if positives else 0
                remedy = "a model needs both outcomes; check the label's column and its `positive`"
                raise UserError(f"label {label!r}: all {rows_meant} are {outcome}; {remedy}")

    def _columns(self) -> tuple[dict[str, Column], dict[str, tuple[str, ...]]]:
        """All columns, each numeric one that is fitted and has missing values with one beside it
        that tells where.
        """
        columns: dict[str, Column] = {}
        groups = dict(self.initial.schema.groups)
        for name, column in self.initial.schema.columns.items():
            columns[name] = self._column(name, column)
            mark = missing_of(name)
            fitted = column.mean if column.counts else column.low
            is_new = fitted is None and column.means is None and column.transform != "none"
            counted = self._counted(name, column)
            is_marked = is_new and counted is not None and counted.count < self.rows[0]
            source = column.source or name
            alike = [n for n, c in columns.items() if c.counts and c.source == source]
            has_mark = bool(column.counts) and any(missing_of(n) in columns for n in alike)
            if is_marked and not has_mark and mark not in self.initial.schema.columns:
                columns[mark] = Column(
                    kind="numeric", source=source, missing=column.missing, transform="missing"
                )
                for group, names in groups.items():
                    groups[group] = (*names, mark) if name in names else names
        return columns, groups

    def _counted(self, name: str, column: Column) -> Statistics | None:
        """Returns what counts the numbers, or the vectors, of a column."""
        return self.statistics.get(number_name(name, 0) if column.kind == "vector" else name)

    def _vector(self, name: str, column: Column) -> Column:
        if column.transform == "none":
            return column
        statistics = [self.statistics[number_name(name, i)] for i in range(column.width)]
        return replace(
            column,
            transform=column.transform or "standard",
            means=column.means or tuple(number.mean for number in statistics),
            stds=column.stds or tuple(number.std for number in statistics),
        )

    def _column(self, name: str, column: Column) -> Column:
        if column.kind == "weight" and column.mean is None:
            return self.sums.with_mean(column) if self.sums else column
        is_fitted = (
            column.boundaries is not None
            or None not in (column.mean, column.std)
            or column.means is not None
        )
        numbers = len(self.values[name]) if name in self.values else None
        counted = self._counted(name, column)
        if counted is not None:
            numbers = counted.count
        if numbers == 0 and not is_fitted:
            raise UserError(
                f"columns.{name}: missing in all {self.rows[0]} training rows; make it kind"
                " 'ignore'"
            )
        if name in self.values:
            assert column.quantiles is not None
            boundaries = features.quantile.quantile_boundaries(self.values[name], column.quantiles)
            return replace(column, boundaries=boundaries)
        if column.kind == "vector":
            return self._vector(name, column)
        if name not in self.statistics:
            return column
        moments = self.statistics[name]
        mean = column.mean
        std = column.std
        if column.transform == "none":
            return column
        # counts go on from day to day
        if column.low is None and column.high is None and numbers and not column.counts:
            column = replace(column, low=moments.low, high=moments.high)
        return replace(
            column,
            transform=column.transform or "standard",
            mean=moments.mean if mean is None else mean,
            std=moments.std if std is None else std,
        )


def _entries(code_M: Int64s, ordinal_M: Int64s, needed: int) -> tuple[Int64s, Int64s, Int64s]:
    """Codes, moments and counts [E] of occurrences: each id's first moments, until there are
    `needed`, and the last.
    """
    size = int(code_M.max()) + 1
    entries: list[Int64s] = []
    have_U = np.zeros(size, np.int64)
    while len(code_M):
        late_M = have_U[code_M] >= needed
        if late_M.any():  # all that is left of these ids
            code = code_M[late_M]
            last_U = np.full(size, -1)
            np.maximum.at(last_U, code, ordinal_M[late_M])
            code_L = np.flatnonzero(last_U >= 0)
            count_U = np.bincount(code, minlength=size)
            entries.append(np.stack([code_L, last_U[code_L], count_U[code_L]]))
            code_M, ordinal_M = code_M[~late_M], ordinal_M[~late_M]
        first_U = np.full(size, np.iinfo(np.int64).max)
        np.minimum.at(first_U, code_M, ordinal_M)
        at_M = ordinal_M == first_U[code_M]
        count_U = np.bincount(code_M[at_M], minlength=size)
        code_F = np.flatnonzero(count_U)
        entries.append(np.stack([code_F, first_U[code_F], count_U[code_F]]))
        have_U += count_U
        code_M, ordinal_M = code_M[~at_M], ordinal_M[~at_M]
    code_E, ordinal_E, count_E = np.concatenate(entries, axis=1)
    return code_E, ordinal_E, count_E


def _bucket_encoding(columns: Mapping[str, Column], table: str | None) -> Encoding:
    """The table of columns that are cut into buckets: as many rows as the one with most needs."""
    most = 1 + max(
        len(column.boundaries or ()) for column in columns.values() if column.table == table
    )
    return Encoding(kind="range", low=1, high=most, rows=most + FIRST, distinct=most)
