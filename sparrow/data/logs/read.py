"""Raw logs as streams of record batches: text of any dialect, Parquet and tables in memory, from
disks and stores.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from sparrow.core.errors import UserError, complaint, suggest
from sparrow.data import logs, shaping
from sparrow.data.logs.beginning import beginnings
from sparrow.data.logs.files import File, find
from sparrow.data.logs.text import BLOCK_BYTES, dialect, text_batches
from sparrow.data.shaping.repair import Repairs
from sparrow.data.shaping.steps import CLICKED, KINDS, Rows, Step, Types
from sparrow.features.ids import is_text
from sparrow.features.schema import Schema, Source
from sparrow.features.types import is_list

__all__ = [
    *("File", "Log", "Repairs", "open_like", "open_log", "refuse_left_out", "shape_like"),
    "with_candidates",
]

_BATCH_ROWS = 1 << 16  # of a table, at most


@dataclass(frozen=True, kw_only=True)
class Log:
    """The files of one raw log in order, or a table in memory.

    columns: of each file. partitioned: further columns, which only the names of folders give. held:
    the types of all these, as far as they can be known without a schema. steps: what is done to the
    rows of the files, such as to make a row of each candidate. types: of the columns after it.
    rows: of all files, or 0 when only reading tells. beginning: the rows that text's types were
    found out from, or the table. left_out: columns of types that are not read, and what is said of
    each. repairs: of the last pass, filled while it runs.
    """

    files: tuple[File, ...]
    source: Source
    columns: tuple[tuple[str, ...], ...]
    held: Types
    types: Types
    rows: int
    steps: tuple[Step, ...] = ()
    beginning: pa.Table | None = None
    left_out: Mapping[str, str] = field(default_factory=dict)
    partitioned: tuple[str, ...] = ()
    repairs: Repairs = field(default_factory=Repairs, compare=False)

    @property
    def is_text(self) -> bool:
        """Whether its files are text."""
        return bool(self.files) and self.source.format != "parquet"

    @property
    def name(self) -> str:
        """What errors call the log."""
        return str(self.files[0]) if self.files else "the table"

    def batches(self, types: Mapping[str, pa.DataType]) -> Iterator[pa.RecordBatch]:
        """Yields the log's rows in order, some 10^4 at a time.

        Their types are those of `batch_types`. With `source.bad_rows` "repair", lines with a wrong
        number of cells are left out, and text that does not convert is missing; `self.repairs`
        counts both.

        Args:
            types: the wanted columns, and the type that text is read as.

        Raises:
            UserError: for a malformed file, a value that is not of its column's type, a file
                without the column, and a file that changed since the log was opened.
        """
        self.repairs.clear()
        for rows in self.shaped_rows(dict(types), self.read_rows):
            self.repairs.rows_made += rows.batch.num_rows
            yield rows.batch

    def batch_types(self, types: Types) -> Types:
        """Returns the types that `batches(types)` gives: of Parquet and tables those that they
        hold, `self.types`.
        """
        return self._stored(types, self.types)

    def _stored(self, types: Types, stored: Types) -> Types:
        if self.is_text:
            return types
        return {
            name: kind if name in self.partitioned else stored[name] for name, kind in types.items()
        }

    def sample(self, rows: int) -> pa.Table:
        """Returns `rows` rows, or all where there are fewer, with all columns read as `types`.

        They are the first ones; of a log of partitions as many of each, see `spread`.
        """
        if self.beginning is None and any(file.partition for file in self.files):
            files = logs.partitions.spread(
                [file.partition for file in self.files], [file.size for file in self.files]
            )
            if len(files) > 1:
                return logs.partitions.spread_sample(self, files, rows)
        if self.beginning is not None and not self.steps:
            return self.beginning.slice(0, rows)
        batches: list[pa.RecordBatch] = []
        missing = rows
        first = (shaped.batch for shaped in self.shaped_rows(self.types, self._begin))
        for batch in first if self.beginning is not None else self.batches(self.types):
            batches.append(batch.slice(0, missing))
            missing -= batches[-1].num_rows
            if missing <= 0:
                break
        empty = [pa.field(name, kind) for name, kind in self.types.items()]
        return pa.Table.from_batches(batches) if batches else pa.schema(empty).empty_table()

    def shaped(self, source: Source, *, is_earlier: bool = False) -> Log:
        """Returns the log with its rows made as a source says: one a candidate, with the columns of
        side tables.

        Args:
            source: what it does not say is found out.
            is_earlier: whether the source is that of an earlier log, whose side tables have the
                columns that they had.

        Raises:
            UserError: for columns that are not there or do not fit, and for side tables that cannot
                be opened.
        """
        names = ("candidates", "clicked", "parallel", "separator", "joins")
        combined = replace(self.source, **{name: getattr(source, name) for name in names})
        log = replace(self, source=combined, types=self.held, steps=())
        for kind, is_needed in KINDS.items():
            if is_needed(log):
                log = getattr(shaping, kind).shape(log, is_earlier)
        return log

    def with_vectors(self, schema: Schema) -> Log:
        """Returns the log with broken vectors taken for missing, if it is repaired. schema: has
        their sizes.
        """
        vectors = {
            schema.columns[name].source or name: schema.columns[name]
            for name in schema.of_kind("vector")
        }
        is_repaired = vectors and self.source.bad_rows == "repair"
        if not is_repaired:
            return self
        return self.then(
            shaping.vectors.RepairedVectors(self.types, vectors, self.source.has_words)
        )

    def like(self, example: Log) -> Log:
        """Returns the log with its rows made as those of another one, whose files are like its
        own.
        """
        return replace(
            self,
            source=example.source,
            steps=example.steps,
            types=example.types,
            rows=example.rows and self.rows,
        )

    def then(self, step: Step, **changes: Any) -> Log:
        """Returns the log with one more step, and with other changes."""
        return replace(self, steps=(*self.steps, step), types=step.types(), **changes)

    def anew(self) -> Log:
        """Returns the log with nothing counted yet."""
        return replace(self, repairs=Repairs())

    def side(self, file: str) -> Log:
        """Returns the log of a side table, which is read as this one is."""
        source = self.source
        side = open_log(
            [file], Source(bad_rows=source.bad_rows, encoding=source.encoding, cells=source.cells)
        )
        files = tuple(replace(f, path=str(f.resolve())) if f.is_local else f for f in side.files)
        return replace(side, files=files, beginning=None)

    def shaped_rows(self, wanted: Types, read: Callable[[Types], Iterator[Rows]]) -> Iterator[Rows]:
        """Yields the rows after all steps. read: gives those that the files hold."""
        needed = [wanted]
        for step in reversed(self.steps):
            needed.insert(0, step.needs(needed[0]))
        stream = read(needed[0])
        for step, types in zip(self.steps, needed[1:], strict=True):
            stream = step.apply(stream, types, self.repairs)
        yield from stream

    def read_rows(self, types: Types) -> Iterator[Rows]:
        """Yields the rows that the files, or the table, hold."""
        for file, columns in zip(self.files, self.columns, strict=True):
            for name in types:
                if name not in columns and name not in file.partition:
                    raise UserError(
                        f"{file}: no column {name!r}, which other files"
                        f" have{suggest(name, columns)}"
                    )
        if not self.files and self.beginning is not None:
            for rows in self._begin(types):
                yield replace(rows, batch=logs.tables.as_held(self, rows.batch, types, "the table"))
        for file, columns in zip(self.files, self.columns, strict=True):
            self.repairs.starts.append(self.repairs.rows)
            try:
                file.check()
                first = 0
                kinds = self._stored(types, self.held)
                own = {name: kind for name, kind in types.items() if name in columns}
                if self.is_text:
                    read_types = own if own or not types else {columns[0]: pa.string()}
                    batches = text_batches(
                        file, self.source, columns, read_types, BLOCK_BYTES, self.repairs
                    )
                else:
                    stored = logs.parquet.batches(file, list(own))
                    batches = (logs.tables.as_held(self, batch, own, str(file)) for batch in stored)
                for batch in batches:
                    if file.partition:
                        more = logs.partitions.with_partition
                        batch = more(batch, file, kinds, self.source, self.repairs, first)
                    yield self._rows_of(file, batch, first)
                    first += batch.num_rows
            except UserError:
                # a file that is being written explains most of what can be wrong with it
                file.check()
                raise
            file.check()

    def _begin(self, types: Types) -> Iterator[Rows]:
        """Yields the rows of the beginning."""
        assert self.beginning is not None
        starts = self.repairs.starts or [0]
        table = self.beginning.select(list(types))
        ends = [*starts[1:], table.num_rows]
        for file, start, end in zip(self.files or (None,), starts, ends, strict=False):
            first = 0
            for batch in table.slice(start, end - start).to_batches(max_chunksize=_BATCH_ROWS):
                yield self._rows_of(file, batch, first)
                first += batch.num_rows

    def _rows_of(self, file: File | None, batch: pa.RecordBatch, first: int) -> Rows:
        row_N = np.arange(first, first + batch.num_rows)
        name = str(file or "the table")
        return Rows(
            batch=batch,
            row_N=row_N,
            file=name,
            number=file.number if file else 0,
            place=partial(self.place, file),
        )

    def place(self, file: File | None, row: int) -> str:
        """Returns where a row of a file is; by its line, if that can be known."""
        return logs.places.place_of(self, file, row)

    def notes(self) -> list[str]:
        """Returns what the last pass repaired or passed over, a line each, with the place where it
        happened first.
        """
        notes = list(self.left_out.values())
        if self.partitioned:
            notes.append(f"columns from the names of folders: {', '.join(self.partitioned)}")
        if self.repairs.has_notes:
            notes += logs.places.repair_notes(self)
        for step in self.steps:
            notes += step.notes()
        return notes

    def located(self, error: UserError, row0: int) -> UserError:
        """Returns an error about a row with the file and the line of that row in its message.

        Args:
            error: its message names a row.
            row0: the number that the message gives to the log's first row.
        """
        return logs.places.located(self, error, row0)


def open_log(inputs: Sequence[str | Path], source: Source | None = None) -> Log:
    """Returns a log: its files, and how to read them.

    Parquet and compressed files are known by their first bytes.

    Args:
        inputs: files, glob patterns, folders and URIs of object stores, which can hold patterns
            too. The matches of a pattern and the files of a folder come in name order.
        source: how text is read. When it is None, or when it says Parquet and the files are text,
            the dialect is found out; even then its delimiter, encoding and bad_rows are obeyed.

    Raises:
        UserError: for a file that is missing, empty or not like the first one, and for two columns
            of one name.
    """
    files = find(inputs)
    wanted = source or Source()
    kinds = [_kind(file, wanted) for file in files]
    first = kinds[0][0]
    for file, (read_as, names) in zip(files, kinds, strict=True):
        if read_as != first:
            remedy = "prepare them apart"
            raise UserError(
                f"{file}: reads as {_words(read_as)} where {files[0]} is {_words(first)}; {remedy}"
            )
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise UserError(f"{file}: two columns are named {twice!r}; rename one")
    columns = tuple(names for _, names in kinds)
    has_partitions = any(file.partition for file in files)
    named = logs.partitions.partition_columns(files, columns) if has_partitions else {}
    in_files = set(itertools.chain.from_iterable(columns))
    partitioned = tuple(name for name in named if name not in in_files)
    if first.format == "parquet":
        types, left_out, rows = logs.parquet.types_of(files)
        types |= {name: kind for name, kind in named.items() if name not in types}
        beginning = None
        repairs = Repairs()
    else:
        beginning, starts = beginnings(files, first, columns, named)
        types = {f.name: f.type for f in beginning.schema}
        left_out = {}
        rows = 0
        repairs = Repairs(starts=starts)  # tells `located` whose rows the beginning has
    log = Log(
        files=files,
        source=first,
        columns=columns,
        held=types,
        types=types,
        left_out=left_out,
        rows=rows,
        beginning=beginning,
        partitioned=partitioned,
        repairs=repairs,
    )
    return log.shaped(wanted)


def with_candidates(log: Log) -> Log:
    """Returns the log with a row for each candidate, if it plainly has lists of them and its source
    says nothing.
    """
    may_have_lists = any(is_list(kind) or is_text(kind) for kind in log.types.values())
    if log.source.candidates is not None or not may_have_lists:
        return log
    sample = log.sample(shaping.candidates.SAMPLE_ROWS)
    source = shaping.candidates.find_candidates(log.source, log.types, sample)
    return log.shaped(source) if source.candidates else log


def open_like(inputs: Sequence[str | Path], source: Source, schema: Schema) -> Log:
    """Returns what `shape_like` does, for the log of these inputs.

    Raises:
        UserError: see `open_log`.
    """
    bare = replace(source, candidates="" if source.candidates else source.candidates, joins=None)
    return shape_like(open_log(inputs, bare), source, schema)


def shape_like(log: Log, source: Source, schema: Schema) -> Log:
    """Returns a log with its rows made as those of an earlier log, but for what was done to them
    already.

    A log with one candidate in each row stays as it is, such as a served one, and so does one that
    has all features without the side tables.

    Args:
        log: without candidates and joins.
        source: of the earlier log.
        schema: says what the features are.

    Raises:
        UserError: see `Log.shaped`, and for a feature of a type that is not read.
    """
    refuse_left_out(log, schema, (*schema.dense, *schema.sparse))
    kind = log.types.get(str(source.candidates), pa.null())
    is_cut_text = log.source.format != "parquet" and not pa.types.is_null(kind)
    has_lists = is_list(kind) or is_text(kind) or is_cut_text
    has_clicks = CLICKED in log.types and source.clicked != CLICKED
    is_joined = True
    for name in (*schema.dense, *schema.sparse):
        if schema.columns[name].transform != "missing":
            is_joined &= all(column in log.types for column in schema.sources(name))
    is_made = has_clicks or not has_lists
    candidates = "" if is_made and source.candidates else source.candidates
    joins = None if is_joined else source.joins
    if not (candidates or joins):
        return log
    return log.shaped(replace(source, candidates=candidates, joins=joins), is_earlier=True)


def refuse_left_out(log: Log, schema: Schema, names: Iterable[str]) -> None:
    """Refuses columns of a schema that are made of a column that the log leaves out, see
    `Log.left_out`.
    """
    for name in names:
        for source in schema.sources(name):
            if source not in log.types and source in log.left_out:
                raise UserError(f"columns.{name}: {log.left_out[source]}")


def _kind(file: File, wanted: Source) -> tuple[Source, tuple[str, ...]]:
    try:
        if file.start(4) != b"PAR1":
            return dialect(file, wanted)
    except (pa.ArrowException, OSError) as error:
        raise UserError(
            f"{file}: cannot be read: {complaint(error)}; check that it is whole"
        ) from None
    with logs.parquet.open_file(file) as parquet:
        names = tuple(parquet.schema_arrow.names)
    return Source(bad_rows=wanted.bad_rows, cells=wanted.cells), names


def _words(source: Source) -> str:
    text = (
        source.format
        if source.header or source.format in ("parquet", "criteo")
        else f"{source.format} (no header)"
    )
    text += f" with {source.delimiter!r}" if source.delimiter else ""
    text += f" in {source.encoding}" if source.encoding != "utf-8" else ""
    return f"{text} of {len(source.names)} columns" if source.names else text
