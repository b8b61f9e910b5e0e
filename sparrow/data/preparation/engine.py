"""What goes through a log's rows in a preparation: an engine. `Local` is this machine. Extensions
may have others, see `sparrow.core.extensions`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa

from sparrow import features
from sparrow.core.errors import UserError
from sparrow.core.prefetch import prefetch
from sparrow.core.progress import Progress
from sparrow.data import preparation
from sparrow.data.batches.parts import PARTS
from sparrow.data.logs.read import Log
from sparrow.data.logs.text_types import types_for
from sparrow.data.preparation.cutter import Cutter
from sparrow.data.preparation.fit import Fitted, Fitter
from sparrow.data.preparation.moments import Clock, hide
from sparrow.data.preparation.spool import Spool, gathered
from sparrow.features.schema import Schema
from sparrow.features.skew import Skew
from sparrow.features.transforms import NotIntegersError, Transforms, typed
from sparrow.features.words import Words

SPOOL_BYTES = 1 << 27  # typed rows that memory holds; those of larger logs go to a file
# of Parquet that is read, and of text that is converted, at a time
BATCH_ROWS, BATCH_BYTES = 1 << 16, 1 << 23


class Engine(Protocol):
    """Goes through the rows of `logs` as `typed` makes them: first `read`, then `count`, `fit` and
    `ordered`.

    ends: where each log's rows end, counted on from log to log. times: of all rows, when there is a
    time. skew:
    how the rows differ from training's, once `ordered` has given all. words: the texts of frequent
    ids, after `fit`.
    """

    ends: list[int]
    times: features.quantile.Ordered | None
    skew: Skew
    words: Words

    def read(self) -> None:
        """Looks at every row once.

        Raises:
            UserError: when something is wrong with a row.
        """

    def count(self, cutter: Cutter, transforms: Transforms, *, grow: bool) -> Transforms:
        """Makes numbers of ids in columns with counts, see `Earlier`. Returns the transforms with
        these counts.
        """

    def fit(self, cutter: Cutter, fitter: Fitter) -> None:
        """Lets the fitter take in every row."""

    def ordered(
        self, fitted: Fitted, cutter: Cutter, partition: int
    ) -> Iterator[tuple[int, pa.Table]]:
        """Yields (part, some of its transformed rows) in the order in which they are to be written.

        They come by time, and those of one time in the log's order. Each part comes at least once.

        Args:
            fitted: what `fit` led to.
            cutter: says which part each row belongs to.
            partition: how much of the time column a partition of a clustered log is, see
                `clustered`; 0 for one partition.
        """

    def notes(self) -> Iterator[str]:
        """Yields what reading repaired or passed over, a line each."""


class Local:
    """This machine: rows are read once and put aside as numbers; what memory does not hold is in
    `work`.
    """

    def __init__(
        self, schema: Schema, logs: Sequence[Log], work: Path, progress: Progress, pool: Executor
    ) -> None:
        self._schema = schema
        self._logs = logs
        self._work = work
        self._pool = pool
        self._progress = progress
        self.ends: list[int] = []
        self.skew = Skew()
        self.times: features.quantile.Ordered | None = None
        self._in_order = True
        self._earlier: preparation.earlier.Earlier | None = None

    def read(self) -> None:
        """See `Engine`."""
        integers = integer_columns(self._schema, self._logs[0])
        while True:
            self._spool = Spool(self._work / "rows", SPOOL_BYTES)
            self.words = Words()
            self.skew = Skew()
            if self._schema.role("time"):
                self.times = features.quantile.Ordered(self._work / "times", np.int64)
            try:
                self._read_as(integers)
                break
            except NotIntegersError as error:  # far into a column of text that began like integers
                integers = integers - {str(error)}
                self._spool.drop()
                (self._work / "times").unlink(missing_ok=True)
        for log, rows in zip(self._logs, np.diff([0, *self.ends]), strict=True):
            assert rows == log.repairs.rows_made == (log.rows or rows), (
                "rows were lost while the log was read"
            )

    def _read_as(self, integers: frozenset[str]) -> None:
        schema, time = self._schema, self._schema.role("time")
        self.ends = []
        self._in_order = True
        last = np.iinfo(np.int64).min
        for log in self._logs:
            for raw in prefetch(raw_batches(schema, log, integers)):
                rows = self._spool.rows
                try:
                    batch = typed(
                        schema,
                        raw,
                        training=True,
                        row0=rows,
                        integers=integers,
                        pool=self._pool,
                        words=self.words,
                        skew=self.skew,
                    )
                except UserError as error:
                    raise log.located(error, self.ends[-1] if self.ends else 0) from None
                self._spool.add(batch)
                if self.times is not None and time is not None and batch.num_rows:
                    t_N = batch.column(time).to_numpy()
                    self._in_order &= bool(t_N[0] >= last and (np.diff(t_N) >= 0).all())
                    last = t_N[-1]
                    self.times.add(t_N)
                self._progress("read", self._spool.rows, log.rows if len(self._logs) == 1 else 0)
            self.ends.append(self._spool.rows)
            if schema.split.by == "file":
                last = np.iinfo(np.int64).min

    def count(self, cutter: Cutter, transforms: Transforms, *, grow: bool) -> Transforms:
        """See `Engine`."""
        if not transforms.schema.counted:
            return transforms
        self._earlier = preparation.earlier.Earlier(
            transforms, cutter, self._work, self._spool.rows, grow=grow
        )
        return self._earlier.count(self._spool)

    def _numbered(self) -> Iterator[pa.RecordBatch]:
        row0 = 0
        for batch in self._spool:
            yield self._earlier.numbered(batch, row0) if self._earlier else batch
            row0 += batch.num_rows

    def fit(self, cutter: Cutter, fitter: Fitter) -> None:
        """See `Engine`."""
        rows, clock = 0, Clock(self._schema)
        for batch in prefetch(self._numbered()):
            fitter.add(batch, cutter.parts(batch, rows), clock.moments(batch, rows))
            rows += batch.num_rows
            self._progress("fit", rows, self._spool.rows)

    def ordered(
        self, fitted: Fitted, cutter: Cutter, partition: int
    ) -> Iterator[tuple[int, pa.Table]]:
        """See `Engine`."""
        schema, time = fitted.transforms.schema, self._schema.role("time")
        parted = prefetch(self._parted(fitted, cutter))
        if self.times is not None and time is not None and not self._in_order:
            parted = preparation.time_order.in_time_order(parted, self.times, time, self._work)
        if schema.cluster:
            parted = preparation.sessions.clustered(
                parted, schema.cluster.by, time or "", partition, self._work
            )
        yield from parted
        self._spool.drop()

    def _parted(self, fitted: Fitted, cutter: Cutter) -> Iterator[tuple[int, pa.Table]]:
        """Yields (part, some of its transformed rows), in the log's order."""
        row0 = 0
        clock = Clock(self._schema)
        schema = fitted.transforms.schema
        for batch in self._numbered():
            table = fitted.transforms.encoded(batch, self._pool, row0, self.skew)
            parts_N = cutter.parts(batch, row0)
            table = hide(schema, table, fitted.since, clock.moments(batch, row0), parts_N == 0)
            row0 += batch.num_rows
            for part in range(len(PARTS)):
                in_part_N = parts_N == part
                yield part, table if in_part_N.all() else table.filter(pa.array(in_part_N))

    def notes(self) -> Iterator[str]:
        """See `Engine`."""
        # side tables are everyone's
        yield from dict.fromkeys(note for log in self._logs for note in log.notes())
        yield from self.words.notes()


def raw_batches(schema: Schema, log: Log, integers: frozenset[str]) -> Iterator[pa.RecordBatch]:
    """Yields what the schema needs of a log. integers: columns of text that will be taken for
    integers, from text.
    """
    return gathered(
        log.with_vectors(schema).batches(raw_types(schema, log, integers)), BATCH_ROWS, BATCH_BYTES
    )


def raw_types(schema: Schema, log: Log, integers: frozenset[str]) -> dict[str, pa.DataType]:
    """Returns the columns of `raw_batches`, and the type that text is read as for each."""
    return types_for(schema, log) | {
        schema.columns[name].source or name: pa.string() for name in integers
    }


def integer_columns(schema: Schema, log: Log) -> frozenset[str]:
    """Returns the columns of text that are taken for integers as long as they hold nothing else.

    They are those in which the log's beginning suggests it.
    """
    if not log.files or log.source.format == "parquet":
        return frozenset()

    def is_whole(source: str) -> bool:
        kind = log.types[source]  # by the rule of words, 12.0 is 12
        return bool(
            pa.types.is_integer(kind) or (log.source.has_words and pa.types.is_floating(kind))
        )

    read = {
        name: column
        for name, column in schema.columns.items()
        if column.kind != "ignore" and not column.counts
    }
    sources = [column.source or name for name, column in read.items()]
    return frozenset(
        name
        for name, column in schema.columns.items()
        if column.kind == "categorical"
        and not column.quantiles
        and not column.part
        and not column.cross
        and schema.encodings[str(column.table)].kind is None
        and is_whole(column.source or name)
        and sources.count(column.source or name) == 1
    )
