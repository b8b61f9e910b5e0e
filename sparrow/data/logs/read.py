"""Raw logs as streams of record batches: text of any dialect, Parquet and tables in memory, from disks and stores."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sparrow.core.errors import UserError, suggest
from sparrow.data.logs.files import File, find, first_line
from sparrow.data.logs.text import CRITEO, codes_of, dialect, line_numbers, text_batches
from sparrow.data.shaping.candidates import CLICKED, SAMPLE_ROWS, Candidates, found, settled
from sparrow.data.shaping.joins import Joined
from sparrow.data.shaping.repair import Repairs, Tally, repaired
from sparrow.data.shaping.steps import Rows, Step, Types
from sparrow.data.shaping.structs import Structs, is_list, is_nested, plain
from sparrow.data.shaping.vectors import RepairedVectors
from sparrow.features.encodings import kind_of
from sparrow.features.ids import is_text
from sparrow.features.schema import Column, Schema, Source

__all__ = [
    *("CRITEO", "File", "Log", "Repairs", "made_again", "open_again", "open_log", "table_log", "types_for"),
    "with_candidates",
]

_BATCH_ROWS, _BATCH_BYTES = 1 << 16, 1 << 23  # of Parquet, at most
_BLOCK_BYTES = 1 << 22
_BEGINNING_BYTES = 1 << 24


@dataclass(frozen=True, kw_only=True)
class Log:
    """The files of one raw log in order, or a table in memory.

    columns: of each file. held: the types of these columns, as far as they can be known without a schema. steps: what
    is done to the rows of the files, such as to make a row of each candidate. types: of the columns after it. rows: of
    all files, or 0 when only reading tells. beginning: the rows that text's types were found out from, or the table.
    repairs: of the last pass, filled while it runs.
    """

    files: tuple[File, ...]
    source: Source
    columns: tuple[tuple[str, ...], ...]
    held: Types
    types: Types
    rows: int
    steps: tuple[Step, ...] = ()
    beginning: pa.Table | None = None
    repairs: Repairs = field(default_factory=Repairs, compare=False)

    @property
    def name(self) -> str:
        """What errors call the log."""
        return str(self.files[0]) if self.files else "the table"

    def batches(self, types: Mapping[str, pa.DataType]) -> Iterator[pa.RecordBatch]:
        """Yields the log's rows in order, some 10^4 at a time.

        Parquet and tables give the types that they hold, `self.types`. With `source.bad_rows` "repair", lines with a
        wrong number of cells are left out, and text that does not convert is missing; `self.repairs` counts both.

        Args:
            types: the wanted columns, and the type that text is read as.

        Raises:
            UserError: for a malformed file, a value that is not of its column's type, a file without the column, and a
                file that changed since the log was opened.
        """
        self.repairs.clear()
        for rows in self._made(dict(types), self._read):
            self.repairs.given += rows.batch.num_rows
            yield rows.batch

    def sample(self, rows: int) -> pa.Table:
        """Returns the first `rows` rows, or all where there are fewer, with all columns read as `types`."""
        if self.beginning is not None and not self.steps:
            return self.beginning.slice(0, rows)
        kept: list[pa.RecordBatch] = []
        first = (made.batch for made in self._made(self.types, self._begin))
        for batch in first if self.beginning is not None else self.batches(self.types):
            kept.append(batch.slice(0, rows - sum(b.num_rows for b in kept)))
            if sum(b.num_rows for b in kept) >= rows:
                break
        empty = [pa.field(name, kind) for name, kind in self.types.items()]
        return pa.Table.from_batches(kept) if kept else pa.schema(empty).empty_table()

    def shaped(self, source: Source) -> Log:
        """Returns the log with its rows made as a source says: one a candidate, with the columns of side tables.

        Raises:
            UserError: for columns that are not there or do not fit, and for side tables that cannot be opened.
        """
        names = ("candidates", "clicked", "parallel", "separator", "joins")
        told = replace(self.source, **{name: getattr(source, name) for name in names})
        log = replace(self, source=told, types=self.held, steps=())
        if any(is_nested(kind) for kind in log.held.values()):
            log = log._then(Structs(log.held))
        joins = told.joins or ()
        if told.candidates is None and any(is_list(log.types.get(join.on, pa.null())) for join in joins):
            told = found(told, log.types, log.sample(SAMPLE_ROWS))  # such a join is one by the candidates
        if told.candidates in log.types and (told.parallel is None or told.separator is None):
            told = settled(told, log.types, log.sample(SAMPLE_ROWS))
        if told.candidates:
            log = replace(log._then(Candidates(source=told, held=log.types)), source=told, rows=0)
        for join in joins:
            side = open_log([join.file], Source(bad_rows=told.bad_rows, encoding=told.encoding))
            here = tuple(replace(f, path=str(f.resolve())) if f.is_local else f for f in side.files)
            log = log._then(Joined(join=join, side=replace(side, files=here, beginning=None), held=log.types))
        return log

    def with_vectors(self, schema: Schema) -> Log:
        """Returns the log with broken vectors taken for missing, if it is repaired. schema: has their sizes."""
        vectors = {schema.columns[name].source or name: schema.columns[name] for name in schema.of_kind("vector")}
        is_repaired = vectors and self.source.bad_rows == "repair"
        return self._then(RepairedVectors(self.types, vectors)) if is_repaired else self

    def like(self, other: Log) -> Log:
        """Returns the log with its rows made as those of another one, whose files are like its own."""
        return replace(self, source=other.source, steps=other.steps, types=other.types, rows=other.rows and self.rows)

    def _then(self, step: Step) -> Log:
        return replace(self, steps=(*self.steps, step), types=step.types())

    def _made(self, wanted: Types, read: Callable[[Types], Iterator[Rows]]) -> Iterator[Rows]:
        """Yields the rows after all steps. read: gives those that the files hold."""
        asked = [wanted]
        for step in reversed(self.steps):
            asked.insert(0, step.needs(asked[0]))
        stream = read(asked[0])
        for step, types in zip(self.steps, asked[1:], strict=True):
            stream = step.made(stream, types, self.repairs)
        yield from stream

    def _read(self, types: Types) -> Iterator[Rows]:
        """Yields the rows that the files, or the table, hold."""
        for file, columns in zip(self.files, self.columns, strict=True):
            for name in types:
                if name not in columns:
                    raise UserError(f"{file}: no column {name!r}, which other files have{suggest(name, columns)}")
        if not self.files and self.beginning is not None:
            for rows in self._begin(types):
                yield replace(rows, batch=self._as_held(rows.batch, types, "the table"))
        for file, columns in zip(self.files, self.columns, strict=True):
            self.repairs.starts.append(self.repairs.rows)
            try:
                file.check()
                first = 0
                if self.source.format == "parquet":
                    batches: Iterator[pa.RecordBatch] = (
                        self._as_held(b, types, str(file)) for b in _parquet_batches(file, list(types))
                    )
                else:
                    batches = text_batches(file, self.source, columns, types, _BLOCK_BYTES, self.repairs)
                for batch in batches:
                    yield self._rows_of(file, batch, first)
                    first += batch.num_rows
            except UserError:
                file.check()  # a file that is being written explains most of what can be wrong with it
                raise
            file.check()

    def _begin(self, types: Types) -> Iterator[Rows]:
        """Yields the rows of the beginning."""
        file, first = self.files[max(len(self.repairs.starts) - 1, 0)] if self.files else None, 0
        assert self.beginning is not None
        for batch in self.beginning.select(list(types)).to_batches(max_chunksize=_BATCH_ROWS):
            yield self._rows_of(file, batch, first)
            first += batch.num_rows

    def _rows_of(self, file: File | None, batch: pa.RecordBatch, first: int) -> Rows:
        row_N, name = np.arange(first, first + batch.num_rows), str(file or "the table")
        return Rows(
            batch=batch, row_N=row_N, file=name, number=file.number if file else 0, place=partial(self._place, file)
        )

    def _place(self, file: File | None, row: int) -> str:
        """Returns where a row of a file is; by its line, if that can be known."""
        if file is None or self.source.format == "parquet" or str(file) in self.repairs.lines:
            return f"row {row}"
        number = row + 1 + self.source.header
        return f"line {line_numbers(file, self.source, {number})[number]}"

    def notes(self) -> list[str]:
        """Returns what the last pass repaired or passed over, a line each, with the place where it happened first."""
        notes: list[str] = []
        for file in self.files or ("the table",):
            cells = {name: tally for (where, name), tally in self.repairs.cells.items() if where == str(file)}
            left_out = self.repairs.lines.get(str(file))
            rows = {tally.row for tally in (*cells.values(), *([left_out] if left_out else []))}
            place = "row"
            if isinstance(file, File) and self.source.format != "parquet":
                place, numbers = "line", line_numbers(file, self.source, rows) if rows else {}
            else:
                numbers = {row: row for row in rows}
            if left_out:
                where = f"first at {place} {numbers[left_out.row]}: {left_out.text}"
                notes.append(f"{file}: {left_out.count:,} lines left out (wrong number of cells), {where}")
            for name, tally in cells.items():
                where = f"first at {place} {numbers[tally.row]}: {tally.text}"
                notes.append(f"{file}: {tally.count:,} cells of {name!r} taken for missing, {where}")
            for (name, what), tally in self.repairs.told.items():
                if name == str(file):
                    at = self._place(file if isinstance(file, File) else None, tally.row)
                    notes.append(f"{file}: {tally.count:,} rows {what}, first at {at}: {tally.text}")
            if spare := self.repairs.breaks.get(str(file)):
                notes.append(f"{file}: {spare:,} lines are blank or lie within a quoted cell; they are no rows")
        for step in self.steps:
            notes += step.notes()
        return notes

    def located(self, error: UserError, row0: int) -> UserError:
        """Returns an error about a row with the file and the line of that row in its message.

        Args:
            error: its message names a row.
            row0: the number that the message gives to the log's first row.
        """
        named = re.search(r", row (\d+):", str(error))
        if not named or not self.files:
            return error
        row = int(named[1]) - row0
        if self.source.candidates:
            return self._located(str(error), named[0], row)
        start, i = max((start, i) for i, start in enumerate(self.repairs.starts) if start <= row)
        return UserError(f"{self.files[i]}, {self._place(self.files[i], row - start)}: {error}")

    def _located(self, text: str, named: str, made: int) -> UserError:
        """Returns an error about a made row, which `named` names, with file, row and candidate. Reads lists again."""
        again = replace(self, repairs=Repairs())
        for rows in again._made({}, again._read):
            if made < len(rows.row_N):
                row = int(rows.row_N[made])
                candidate = made - int(np.searchsorted(rows.row_N, row))
                return UserError(f"{rows.file}, {rows.place(row)}: {text.replace(named, f', candidate {candidate}:')}")
            made -= len(rows.row_N)
        return UserError(text)

    def _as_held(self, batch: pa.RecordBatch, types: Mapping[str, pa.DataType], where: str) -> pa.RecordBatch:
        """Returns a batch of Parquet or of a table in the log's types. Repairs its text if that is wanted."""
        columns = {}
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            try:
                columns[name] = column.cast(self.held[name]) if column.type != self.held[name] else column
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
                raise UserError(f"{where}: column {name!r}: {first_line(error)}; write all files alike") from None
        first = self.repairs.rows - (self.repairs.starts[-1] if self.repairs.starts else 0)
        self.repairs.rows += batch.num_rows
        batch = pa.RecordBatch.from_pydict(columns)
        if self.source.bad_rows == "repair":
            given, (batch, bad) = batch, repaired(batch, {n: t for n, t in types.items() if not pa.types.is_nested(t)})
            for name, places in bad.items():
                value = str(given.column(name)[places[0]].as_py())
                self.repairs.cells.setdefault((where, name), Tally()).add(len(places), first + places[0], value)
        return batch


def open_log(inputs: Sequence[str | Path], source: Source | None = None) -> Log:
    """Returns a log: its files, and how to read them.

    Parquet and compressed files are known by their first bytes.

    Args:
        inputs: files, glob patterns, folders and URIs of object stores, which can hold patterns too. The matches of a
            pattern and the files of a folder come in name order.
        source: how text is read. When it is None, or when it says Parquet and the files are text, the dialect is found
            out; even then its delimiter, encoding and bad_rows are obeyed.

    Raises:
        UserError: for a file that is missing, empty or not like the first one, and for two columns of one name.
    """
    files, told = find(inputs), source or Source()
    kinds = [_kind(file, told) for file in files]
    first = kinds[0][0]
    for file, (other, names) in zip(files, kinds, strict=True):
        if other != first:
            remedy = "prepare them apart"
            raise UserError(f"{file}: reads as {_words(other)} where {files[0]} is {_words(first)}; {remedy}")
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise UserError(f"{file}: two columns are named {twice!r}; rename one")
    columns = tuple(names for _, names in kinds)
    if first.format == "parquet":
        types, rows = _parquet_types(files)
        log = Log(files=files, source=first, columns=columns, held=types, types=types, rows=rows)
        return log.shaped(told)
    beginnings = ((i, _beginning(file, first, columns[i])) for i, file in enumerate(files))
    i, beginning = next(((i, table) for i, table in beginnings if table is not None), (0, None))
    if beginning is None:
        raise UserError(f"{files[0]}: no rows; give a log with at least one")
    types = {f.name: pa.string() if pa.types.is_null(f.type) else f.type for f in beginning.schema}
    beginning = beginning.cast(pa.schema(list(types.items())))
    repairs = Repairs(starts=[0] * (i + 1))  # tells `located` which file the beginning is of
    log = Log(
        files=files,
        source=first,
        columns=columns,
        held=types,
        types=types,
        rows=0,
        beginning=beginning,
        repairs=repairs,
    )
    return log.shaped(told)


def table_log(table: pa.Table, source: Source | None = None) -> Log:
    """Returns a log of the rows of a table in memory.

    Args:
        table: the rows.
        source: only its bad_rows, candidates and joins are obeyed.

    Raises:
        UserError: for two columns of one name, and like `Log.shaped`.
    """
    names = table.column_names
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"the table: two columns are named {twice!r}; rename one")
    types = {f.name: plain(f.type) for f in table.schema}
    table = pa.table([table[name].cast(kind) for name, kind in types.items()], names=names)
    told = source or Source()
    read = Source(bad_rows=told.bad_rows)
    log = Log(files=(), source=read, columns=(), held=types, types=types, rows=table.num_rows, beginning=table)
    return log.shaped(told)


def with_candidates(log: Log) -> Log:
    """Returns the log with a row for each candidate, if it plainly has lists of them and its source says nothing."""
    if log.source.candidates is not None:
        return log
    told = found(log.source, log.types, log.sample(SAMPLE_ROWS))
    return log.shaped(told) if told.candidates else log


def open_again(inputs: Sequence[str | Path], source: Source, schema: Schema) -> Log:
    """Returns what `made_again` does, for the log of these inputs.

    Raises:
        UserError: see `open_log`.
    """
    bare = replace(source, candidates="" if source.candidates else source.candidates, joins=None)
    return made_again(open_log(inputs, bare), source, schema)


def made_again(log: Log, source: Source, schema: Schema) -> Log:
    """Returns a log with its rows made as those of an earlier log, but for what was done to them already.

    A log with one candidate in each row stays as it is, such as a served one, and so does one that has all features
    without the side tables.

    Args:
        log: without candidates and joins.
        source: of the earlier log.
        schema: says what the features are.

    Raises:
        UserError: see `Log.shaped`.
    """
    kind, features = log.types.get(str(source.candidates), pa.null()), (*schema.dense, *schema.sparse)
    is_made = not (is_list(kind) or is_text(kind) or (log.source.format != "parquet" and not pa.types.is_null(kind)))
    is_made |= CLICKED in log.types and source.clicked != CLICKED
    columns = {name: schema.columns[name] for name in features if schema.columns[name].transform != "missing"}
    is_joined = all(source in log.types for name in columns for source in schema.sources(name))
    candidates = "" if is_made and source.candidates else source.candidates
    joins = None if is_joined else source.joins
    return log.shaped(replace(source, candidates=candidates, joins=joins)) if candidates or joins else log


def types_for(schema: Schema, log: Log) -> dict[str, pa.DataType]:
    """Returns the log's columns that the schema needs, and the type that text is to be read as for each.

    Numbers are float64. Times that are not numbers are text. Ids are int64 for a table of encoding "range", and strings
    for "vocabulary" and "hash" (so "007" stays itself). While a table has no encoding yet, its ids are what the log's
    beginning suggests.
    """
    types: dict[str, pa.DataType] = {}
    for name, column in schema.columns.items():
        wanted = _wanted(schema, name, log)
        if column.missing and log.source.bad_rows == "stop":  # else these cells are repaired as any that do not fit
            wanted = dict.fromkeys(wanted, pa.string())
        for source, kind in wanted.items():
            if column.kind == "ignore" or source not in log.types:
                continue
            if types.setdefault(source, kind) != kind:  # a column that serves twice
                types[source] = pa.string() if pa.string() in (kind, types[source]) else log.types[source]
    return types


def _wanted(schema: Schema, name: str, log: Log) -> dict[str, pa.DataType | None]:
    """Returns the log's columns that one of the schema is made of, and the type that text is read as for each."""
    column = schema.columns[name]
    if column.cross:
        return {source: kind for part in column.cross for source, kind in _wanted(schema, part, log).items()}
    source, *weights = schema.sources(name)
    return {source: _text_type(column, schema, log.types.get(source)), **dict.fromkeys(weights, pa.string())}


def _text_type(column: Column, schema: Schema, kind: pa.DataType | None) -> pa.DataType | None:
    encoding = schema.encodings[column.table] if column.table else None
    if encoding is None or encoding.kind is None or column.part is not None:
        integers = None
    else:
        integers = kind_of(encoding).takes_integers
    what = "group" if column.counts else column.kind  # both are ids that are hashed
    if what in ("numeric", "weight", "baseline") or column.quantiles or column.threshold is not None:
        return pa.float64()
    single = ("categorical", "group", "session", "time", "ignore")
    if kind is None or (pa.types.is_floating(kind) and what in single):
        return kind  # pandas writes the id 12 as 12.0 where others are missing
    always = what in ("group", "session", "list", "vector", "ignore")
    if always or integers is False or pa.types.is_temporal(kind):
        return pa.string()
    return pa.int64() if integers else kind


def _kind(file: File, told: Source) -> tuple[Source, tuple[str, ...]]:
    try:
        if file.start(4) != b"PAR1":
            return dialect(file, told)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{file}: cannot be read: {first_line(error)}; check that it is whole") from None
    with _parquet(file) as parquet:
        return Source(bad_rows=told.bad_rows), tuple(parquet.schema_arrow.names)


def _words(source: Source) -> str:
    text = source.format if source.header or source.format in ("parquet", "criteo") else f"{source.format} (no header)"
    text += f" with {source.delimiter!r}" if source.delimiter else ""
    text += f" in {source.encoding}" if source.encoding != "utf-8" else ""
    return f"{text} of {len(source.names)} columns" if source.names else text


def _beginning(file: File, source: Source, names: tuple[str, ...]) -> pa.Table | None:
    """Returns a text file's first rows in the types that they suggest, or None when it has no rows.

    Arrow takes integers beyond 2^63 for floats, which would merge ids. One cell such as 1.42e+19 makes floats of a
    whole column. So a column with cells of more digits than a float keeps is read once more, as text. So is one with
    cells such as 007, of which Arrow makes 7.
    """
    try:
        criteo = {name: pa.string() if name[0] == "C" else pa.int64() for name in CRITEO}
        known = criteo if source.format == "criteo" else None
        few = (_BEGINNING_BYTES, Repairs(), _BEGINNING_BYTES + _BLOCK_BYTES)
        first = next(text_batches(file, source, names, known, *few), None)
        if first is None:
            return None
        table = pa.table(first)
        huge = [f.name for f in first.schema if pa.types.is_floating(f.type) and _is_huge(first[f.name])]
        coded = [name for name in codes_of(file, source, names) if pa.types.is_integer(first[name].type) and not known]
        if huge or coded:
            texts = next(text_batches(file, source, names, dict.fromkeys([*huge, *coded], pa.string()), *few))
            for name in (*huge, *coded):
                if name in coded or pc.any(pc.match_substring_regex(texts[name], r"^\s*[-+]?\d{16,}\s*$")).as_py():
                    table = table.set_column(table.column_names.index(name), name, texts[name])
    except UserError:
        file.check()
        raise
    return table


def _is_huge(column: pa.Array) -> bool:
    """Returns whether there are numbers beyond 2^53, where floats begin to merge integers."""
    x_N = column.drop_null().to_numpy(zero_copy_only=False)
    return bool(np.isfinite(x_N).any() and np.abs(x_N[np.isfinite(x_N)]).max() >= 2.0**53)


def _parquet(file: File) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(file.system.open_input_file(file.path), page_checksum_verification=True)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise UserError(f"{file}: not a whole Parquet file: {first_line(error)}; write it again") from None


def _parquet_types(files: Sequence[File]) -> tuple[dict[str, pa.DataType], int]:
    """Returns the columns' types, wide enough for all files, and the number of rows of all files."""
    types: dict[str, pa.DataType] = {}
    rows = 0
    for file in files:
        with _parquet(file) as parquet:
            rows += parquet.metadata.num_rows
            for f in parquet.schema_arrow:
                fields = [pa.field(f.name, types.get(f.name, plain(f.type))), pa.field(f.name, plain(f.type))]
                try:
                    both = pa.unify_schemas([pa.schema([x]) for x in fields], promote_options="permissive")
                except pa.ArrowException:
                    words = f"{f.type} where earlier files have {types[f.name]}; write all files alike"
                    raise UserError(f"{file}: column {f.name!r} is {words}") from None
                types[f.name] = both.field(0).type
    with _parquet(files[0]) as parquet:
        return {name: types[name] for name in parquet.schema_arrow.names}, rows


def _batch_rows(group: pq.RowGroupMetaData, columns: int) -> int:
    """Returns how many of a row group's rows are read at a time: about _BATCH_BYTES, if it is even.

    The group is asked for its size, not those of its columns: there, a damaged footer makes Arrow end the process.
    """
    size = max(group.total_byte_size, 8 * columns * group.num_rows, 1)
    return max(1, min(_BATCH_ROWS, _BATCH_BYTES * group.num_rows // size))


def _cut(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Returns the batch in pieces of about _BATCH_BYTES. Text that repeats is small in the file, not in memory."""
    pieces = min(-(-batch.nbytes // _BATCH_BYTES), batch.num_rows) or 1
    edges = [batch.num_rows * i // pieces for i in range(pieces + 1)]
    return (batch.slice(low, high - low) for low, high in itertools.pairwise(edges))


def _parquet_batches(file: File, names: list[str]) -> Iterator[pa.RecordBatch]:
    with _parquet(file) as parquet:
        rows = parquet.metadata.num_rows
        try:
            for group in range(parquet.num_row_groups):  # one by one: Arrow fetches all that it is asked for at once
                size = _batch_rows(parquet.metadata.row_group(group), len(names))
                for batch in parquet.iter_batches(size, row_groups=[group], columns=names):
                    batch.validate(full=True)  # text that is not UTF-8, offsets beyond the data
                    rows -= batch.num_rows
                    yield from _cut(batch)
        except (pa.ArrowException, OSError, ValueError) as error:
            if isinstance(error, UserError):
                raise
            if "lists to be of size" in str(error):  # one is missing, and Arrow does not read what it has written
                told = "a fixed-size list is missing in a row, which Arrow cannot read"
                raise UserError(f"{file}: {told}; write the column as plain lists") from None
            raise UserError(f"{file}: damaged Parquet: {first_line(error)}; write it again") from None
        if rows:
            words = f"{abs(rows):,} rows too {'few' if rows > 0 else 'many'}"
            raise UserError(f"{file}: damaged Parquet: {words}; write it again")
