"""A preparation on a Ray cluster through daft: its machines read, transform and sort, this one
merges and writes.

A file of the log is a task. Nothing depends on where files begin or on which machine is the first
to be done: what is fitted are counts, exact sums and order statistics, and the rows' order is that
of a key that ends in the row's number. So the output is that of one machine, to the bit.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import re
import socket
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import pyarrow as pa

from sparrow.core.arrays import Int64s
from sparrow.core.errors import UserError, first_line
from sparrow.core.progress import Progress
from sparrow.data.batches.parts import PARTS
from sparrow.data.logs.read import Log, Repairs
from sparrow.data.preparation.cutter import LEFT_OUT, Cutter
from sparrow.data.preparation.engine import integer_columns, raw_batches, raw_types
from sparrow.data.preparation.fit import Fitted, Fitter
from sparrow.data.preparation.fit_state import absorb, fitter_state
from sparrow.data.preparation.moments import Clock, Request, hide
from sparrow.features.encodings.vocabulary import EMPTY
from sparrow.features.quantile import Ordered
from sparrow.features.runs import mixed
from sparrow.features.schema import Schema
from sparrow.features.skew import Skew
from sparrow.features.transforms import NotIntegersError, Transforms, typed
from sparrow.features.words import Words

try:
    for name in ("RAY_USAGE_STATS_ENABLED", "DAFT_ANALYTICS_ENABLED", "DAFT_PROGRESS_BAR"):
        # nothing is sent anywhere; the progress that people see is ours
        os.environ.setdefault(name, "0")
    import daft
    import ray
    from daft.exceptions import DaftCoreException
    from daft.io.pushdowns import Pushdowns
    from daft.io.source import DataSource, DataSourceTask
    from daft.recordbatch import RecordBatch
except ImportError as error:
    raise UserError(f"ray: {error}; pip install 'sparrow-rec[ray]'") from None

Message = tuple[str, str, Int64s, Int64s]
Work = Callable[[], Iterator[pa.RecordBatch]]

_KEYS = pa.schema(  # what the rows are sorted by; no column of a log is named so
    {
        ":part": pa.int8(),
        ":partition": pa.int64(),
        ":session": pa.uint64(),
        ":time": pa.int64(),
        ":row": pa.int64(),
    }
)
_MESSAGE = pa.schema(
    {
        "kind": pa.large_string(),
        "name": pa.large_string(),
        "a": pa.large_list(pa.int64()),
        "b": pa.large_list(pa.int64()),
    }
)
_NONE = np.empty(0, np.int64)


@dataclass(frozen=True, kw_only=True)
class _Piece:
    """One file. place: among the files of all logs; row0, rows: its rows among theirs, once known;
    before: the request that the files before end with.
    """

    log: Log
    place: int
    row0: int = 0
    rows: int = 0
    before: Request | None = None

    def typed(
        self,
        schema: Schema,
        integers: frozenset[str],
        words: Words | None = None,
        skew: Skew | None = None,
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Typed rows and the number of the first of them. words, skew: see `typed`."""
        row0 = self.row0
        for raw in raw_batches(schema, self.log, integers):
            try:
                yield (
                    row0,
                    typed(
                        schema,
                        raw,
                        training=True,
                        row0=row0,
                        integers=integers,
                        words=words,
                        skew=skew,
                    ),
                )
            except UserError as error:
                raise self.log.located(error, self.row0) from None
            row0 += raw.num_rows


class OnRay:
    """The engine (see `Engine`) on the Ray cluster at `address`."""

    def __init__(
        self, schema: Schema, logs: Sequence[Log], work: Path, progress: Progress, *, address: str
    ) -> None:
        if any(log.beginning is not None and not log.files for log in logs):
            raise UserError(
                "ray: a table in memory is on one machine; write it to files, or leave ray out"
            )
        self._schema = schema
        self._logs = logs
        self._work = work.resolve()
        self._progress = progress  # workers run elsewhere
        self._integers = integer_columns(schema, logs[0])
        self._pieces: list[_Piece] = []
        for log in logs:
            for file, names in zip(log.files, log.columns, strict=True):
                file = replace(file, path=str(file.resolve())) if file.is_local else file
                file_log = replace(
                    log, files=(file,), columns=(names,), rows=0, beginning=None, repairs=Repairs()
                )
                self._pieces.append(_Piece(log=file_log, place=len(self._pieces)))
        self._notes: list[tuple[int, str]] = []
        self.ends: list[int] = []
        self.skew = Skew()
        self.words = Words()
        _connect(address)

    def read(self) -> None:
        """See `Engine`; looks only at what tells where rows belong, and whether text is
        integers.
        """
        while True:
            self.times: Ordered | None = Ordered(self._work / "times", np.int64)
            try:
                rows, edges = self._read()
                break
            except NotIntegersError as error:
                self._integers = self._integers - {str(error)}
                (self._work / "times").unlink(missing_ok=True)
        row0, before = 0, Request()
        for place, count in enumerate(rows.tolist()):
            self._pieces[place] = replace(self._pieces[place], row0=row0, rows=count, before=before)
            if count:
                first, last = edges[place]
                if last.row0 or not before.joins(first):
                    before = replace(last, row0=row0 + last.row0)
            row0 += count
        files = np.cumsum([len(log.files) for log in self._logs])
        self.ends = [int(rows[:count].sum()) for count in files]
        for log, count in zip(self._logs, np.diff([0, *self.ends]), strict=True):
            assert count == (log.rows or count), "rows were lost while the log was read"

    def _read(self) -> tuple[Int64s, dict[int, tuple[Request, Request]]]:
        """Rows of each file, and the requests that one begins and ends with."""
        wanted = {*self._integers, *self._schema.of_kind("time", "group", "session")} or {
            self._schema.labels[0]
        }
        columns = {name: column for name, column in self._schema.columns.items() if name in wanted}
        lean = replace(self._schema, columns=columns, groups={}, cluster=None)
        rows, expected = np.zeros(len(self._pieces), np.int64), sum(log.rows for log in self._logs)
        edges = {}
        for kind, name, a, b in _messages(
            [partial(_times, piece, lean, self._integers) for piece in self._pieces]
        ):
            if kind == "edges":
                keys = [tuple(key.tolist()) or None for key in np.split(a, [b[1]])]
                edges[int(name)] = Request(keys[0]), Request(keys[1], int(b[0]))
                continue
            rows[int(name)] += b[0]
            assert self.times is not None
            self.times.add(a)
            self._progress("read", int(rows.sum()), expected)
        return rows, edges

    def count(self, cutter: Cutter, transforms: Transforms, *, grow: bool) -> Transforms:
        """See `Engine`; there are none."""
        return transforms

    def fit(self, cutter: Cutter, fitter: Fitter) -> None:
        """See `Engine`."""
        # which there are is all that counting asks
        known = dict.fromkeys(fitter.initial.vocabularies, EMPTY)
        transforms = replace(fitter.initial, vocabularies=known)
        for kind, name, a, b in _messages(
            [
                partial(_counted, piece, transforms, fitter.grow, cutter, self._integers)
                for piece in self._pieces
            ]
        ):
            if kind == "note":
                self._notes.append((int(a[0]), name))
            elif kind == "missing":
                column, word = json.loads(name)
                self.words.count_missing(column, word, int(a[0]))
            elif kind == "words":
                column, texts = json.loads(name)
                self.words.add(column, texts, a, b)
            else:
                absorb(fitter, kind, name, a, b)
                self._progress("fit", int(fitter.rows.sum()) + fitter.left_out, self.ends[-1])

    def ordered(
        self, fitted: Fitted, cutter: Cutter, partition: int
    ) -> Iterator[tuple[int, pa.Table]]:
        """See `Engine`."""
        folder, transforms = self._work / "fitted", fitted.transforms
        folder.mkdir()
        transforms.save(folder)
        for i, name in enumerate(transforms.schema.encodings):
            if name in fitted.since:
                np.save(folder / f"since-{i}.npy", fitted.since[name])
        log = self._logs[0]
        types = log.batch_types(raw_types(transforms.schema, log, self._integers))
        empty = pa.schema(list(types.items())).empty_table()
        typed_empty = typed(transforms.schema, empty, training=True, integers=self._integers)
        columns = transforms.encoded(typed_empty).schema
        for part in range(len(PARTS)):
            yield part, columns.empty_table()
        tasks = [
            partial(_keyed, piece, str(folder), cutter, partition, self._integers)
            for piece in self._pieces
        ]
        for batch in _run(tasks, pa.schema([*columns, *_KEYS]), _KEYS.names):
            part_N = batch.column(":part").to_numpy()
            table = pa.table(batch).select(columns.names).cast(columns)
            edges = [0, *(np.flatnonzero(np.diff(part_N)) + 1).tolist(), len(part_N)]
            for first, last in itertools.pairwise(edges):
                if last > first:
                    yield int(part_N[first]), table.slice(first, last - first)
        for piece in self._pieces:
            self.skew.merge(Skew.load(folder / f"skew-{piece.place}.json"))

    def notes(self) -> Iterator[str]:
        """See `Engine`."""
        yield from dict.fromkeys(note for _, note in sorted(self._notes, key=lambda item: item[0]))
        yield from self.words.notes()


def _times(piece: _Piece, schema: Schema, integers: frozenset[str]) -> Iterator[pa.RecordBatch]:
    """The times of a file, and its rows, a batch each; then the requests that it begins and ends
    with.
    """
    time, clock = schema.role("time"), Clock(schema)
    for row0, batch in piece.typed(schema, integers):
        times_N = batch.column(time).to_numpy() if time else _NONE
        clock.moments(batch, row0)
        yield _message("times", str(piece.place), times_N, np.array([batch.num_rows]))
    if clock.first is not None:
        keys = [np.array(request.key or (), np.int64) for request in (clock.first, clock.last)]
        edges = np.array([clock.last.row0, len(keys[0])])
        yield _message("edges", str(piece.place), np.concatenate(keys), edges)


def _counted(
    piece: _Piece, transforms: Transforms, grow: bool, cutter: Cutter, integers: frozenset[str]
) -> Iterator[pa.RecordBatch]:
    """What a fitter knows of a file, and what reading it repaired."""
    with tempfile.TemporaryDirectory() as folder:
        fitter = Fitter(transforms, Path(folder), grow=grow)
        clock = Clock(transforms.schema, piece.before)
        words = Words()
        for row0, batch in piece.typed(transforms.schema, integers, words):
            fitter.add(batch, cutter.parts(batch, row0), clock.moments(batch, row0))
        if fitter.rows.sum() + fitter.left_out != piece.rows:
            raise UserError(
                f"{piece.log.name}: changed while it was read; copy it first and name the copy"
            )
        for state in fitter_state(fitter):
            yield _message(*state)
    for column, texts, hashes_U, counts_U in words.state():
        yield _message("words", json.dumps([column, texts]), hashes_U, counts_U)
    for column, missing in words.missing.items():
        for word, count in missing.items():
            yield _message("missing", json.dumps([column, word]), np.array([count]), _NONE)
    for note in piece.log.notes():
        yield _message("note", note, np.array([piece.place]), _NONE)


def _keyed(
    piece: _Piece, folder: str, cutter: Cutter, partition: int, integers: frozenset[str]
) -> Iterator[pa.RecordBatch]:
    """A file's transformed rows with what they are sorted by."""
    fitted = _loaded(folder)
    schema, clock = fitted.transforms.schema, Clock(fitted.transforms.schema, piece.before)
    time, skew = schema.role("time"), Skew()
    for row0, batch in piece.typed(schema, integers, skew=skew):
        parts_N, zeros_N = cutter.parts(batch, row0), np.zeros(batch.num_rows, np.int64)
        table = fitted.transforms.encoded(batch, row0=row0, skew=skew)
        table = hide(schema, table, fitted.since, clock.moments(batch, row0), parts_N == 0)
        t_N = batch.column(time).to_numpy() if time else zeros_N
        partition_N, session_N = zeros_N, zeros_N.astype(np.uint64)
        if schema.cluster:
            partition_N = t_N // partition if partition else zeros_N
            session_N = mixed(batch.column(schema.cluster.by).to_numpy())
        row_N = row0 + np.arange(batch.num_rows)
        keys = parts_N.astype(np.int8), partition_N, session_N, t_N, row_N
        for field, key_N in zip(_KEYS, keys, strict=True):
            table = table.append_column(field, pa.array(key_N))
        yield from table.filter(pa.array(parts_N != LEFT_OUT)).combine_chunks().to_batches()
    skew.save(Path(folder) / f"skew-{piece.place}.json")


@lru_cache(1)
def _loaded(folder: str) -> Fitted:
    transforms = Transforms.load(folder)
    files = {
        name: Path(folder) / f"since-{i}.npy" for i, name in enumerate(transforms.schema.encodings)
    }
    since = {name: np.load(file) for name, file in files.items() if file.exists()}
    return Fitted(transforms=transforms, since=since)


def _message(kind: str, name: str, a: Int64s, b: Int64s) -> pa.RecordBatch:
    lists = [pa.LargeListArray.from_arrays([0, len(x)], pa.array(x, pa.int64())) for x in (a, b)]
    return pa.RecordBatch.from_arrays(
        [pa.array([kind], pa.large_string()), pa.array([name], pa.large_string()), *lists],
        schema=_MESSAGE,
    )


def _messages(tasks: Sequence[Work]) -> Iterator[Message]:
    """The messages of all tasks, as they come."""
    for batch in _run(tasks, _MESSAGE):
        kinds, names, *lists = batch.columns
        for i, (kind, name) in enumerate(zip(kinds.to_pylist(), names.to_pylist(), strict=True)):
            a, b = (column[i].values.to_numpy(zero_copy_only=False) for column in lists)
            yield kind, name, a, b


class _Task(DataSourceTask):
    def __init__(self, work: Work, columns: pa.Schema) -> None:
        self._work = work
        self._columns = columns

    @property
    def schema(self) -> daft.Schema:
        return daft.Schema.from_pyarrow_schema(self._columns)

    async def read(self) -> AsyncIterator[RecordBatch]:
        batches = self._work()
        # files side by side in one process
        while (batch := await asyncio.to_thread(next, batches, None)) is not None:
            yield RecordBatch.from_arrow_record_batches([batch], self._columns)


class _Source(DataSource):
    def __init__(self, tasks: Sequence[Work], columns: pa.Schema) -> None:
        self._tasks = tasks
        self._columns = columns

    @property
    def name(self) -> str:
        return "sparrow prepare"

    @property
    def schema(self) -> daft.Schema:
        return daft.Schema.from_pyarrow_schema(self._columns)

    async def get_tasks(self, pushdowns: Pushdowns) -> AsyncIterator[DataSourceTask]:
        for work in self._tasks:
            yield _Task(work, self._columns)


def _run(
    tasks: Sequence[Work], columns: pa.Schema, keys: Sequence[str] = ()
) -> Iterator[pa.RecordBatch]:
    """Yields what the tasks give, sorted by `keys`.

    Raises:
        UserError: for what a task raises, and for what else goes wrong there.
    """
    frame = _Source(tasks, columns).read()
    if keys:
        frame = frame.sort(list(keys))
    try:
        yield from frame.to_arrow_iter()
    except (DaftCoreException, ray.exceptions.RayError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        for line in reversed(lines):
            if match := re.search(r"\b(UserError|NotIntegersError): (.*)", line):
                kind = UserError if match[1] == "UserError" else NotIntegersError
                raise kind(match[2]) from None
        raise UserError(
            f"ray: {lines[-1] if lines else type(error).__name__}; see the cluster's logs"
        ) from error


def _connect(address: str) -> None:
    """Take the running cluster of this process, the one at `address`, or begin one."""
    if not ray.is_initialized():
        try:
            if at := re.fullmatch(r"(?:ray://)?\[?([^]/]+)\]?:(\d+)", address):
                # Ray would ask for ever
                socket.create_connection((at[1], int(at[2])), timeout=10).close()
            ray.init(address, logging_level=logging.ERROR, log_to_driver=False)
        except (OSError, ValueError, RuntimeError) as error:
            remedy = (
                "name the address that `ray start --head` told (its token: RAY_AUTH_MODE), or say"
                " local"
            )
            raise UserError(
                f"ray: no cluster answers at {address!r} ({first_line(error)}); {remedy}"
            ) from None
    daft.set_runner_ray(noop_if_initialized=True)
    if daft.get_or_infer_runner_type() != "ray":
        raise UserError("ray: this process has used daft without Ray; prepare in a new one")
