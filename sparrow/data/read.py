"""Raw logs as streams of record batches: Parquet, CSV, TSV and the Criteo dialect, plain or compressed."""

from __future__ import annotations

import csv
import glob
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from sparrow.core.errors import UserError, suggest
from sparrow.data.schema import Schema, Source

CRITEO = ("label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27)))
MISSING = ["", "NA", "N/A", "#N/A", "NaN", "nan", "NULL", "null", "None", "\\N"]

_BATCH_ROWS = 1 << 16
_BLOCK_BYTES = 1 << 23
_SAMPLE_BYTES = 1 << 25
_SUFFIXES = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2", ".lz4": "lz4"}


@dataclass(frozen=True, kw_only=True)
class Log:
    """Files of one raw log in order; types: of its columns, as far as they can be known without a schema.

    rows: in all, or 0 when only reading tells.
    """

    files: tuple[Path, ...]
    source: Source
    types: dict[str, pa.DataType]
    rows: int

    def batches(self, types: Mapping[str, pa.DataType]) -> Iterator[pa.RecordBatch]:
        """The log's rows in order, some 10^4 at a time, with the columns of `types`.

        CSV and TSV are read as these types, Parquet as what it holds. Raises UserError for a malformed file, a value
        that is not of its column's type, or a file without the column.
        """
        for file in self.files:
            if self.source.format == "parquet":
                yield from _parquet_batches(file, list(types))
            else:
                yield from _text_batches(file, self.source, types, _BLOCK_BYTES)

    def sample(self, rows: int) -> pa.Table:
        """About the first `rows` rows with all columns, read as `types`."""
        kept: list[pa.RecordBatch] = []
        for batch in self.batches(self.types):
            kept.append(batch.slice(0, rows - sum(b.num_rows for b in kept)))
            if sum(b.num_rows for b in kept) >= rows:
                break
        empty = [pa.field(name, kind) for name, kind in self.types.items()]
        return pa.Table.from_batches(kept) if kept else pa.schema(empty).empty_table()


def open_log(inputs: Sequence[str | Path], source: Source | None = None) -> Log:
    """Find a log's files and how to read them.

    inputs: files, glob patterns (matches in name order) and folders (their files in name order). source: how text is
    read; found out when None or when it says Parquet and the files are none. Parquet is known by its first bytes.
    Raises UserError for a file that is missing, empty or not like the first one.
    """
    files = tuple(file for text in inputs for file in _expand(str(text)))
    if not files:
        raise UserError("inputs: none given; name at least one file")
    sources = [_detect(file, source) for file in files]
    for file, other in zip(files, sources, strict=True):
        if other != sources[0]:
            raise UserError(
                f"{file}: reads as {_words(other)} where {files[0]} is {_words(sources[0])}; prepare them apart"
            )
    if sources[0].format == "parquet":
        rows = 0
        for file in reversed(files):
            with _parquet(file) as parquet:
                fields, rows = list(parquet.schema_arrow), rows + parquet.metadata.num_rows
        names, types = [f.name for f in fields], {f.name: f.type for f in fields}
    else:
        first = next(_text_batches(files[0], sources[0], None, _SAMPLE_BYTES), None)
        if first is None:
            raise UserError(f"{files[0]}: no rows; give a log with at least one")
        names = first.schema.names
        types, rows = {f.name: pa.string() if pa.types.is_null(f.type) else f.type for f in first.schema}, 0
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UserError(f"{files[0]}: two columns are named {twice!r}; rename one")
    return Log(files=files, source=sources[0], types=types, rows=rows)


def types_for(schema: Schema, log: Log) -> dict[str, pa.DataType]:
    """The log's columns that the schema needs, and how text is to be read for them.

    Numbers and weights as float64; ids as int64 for a table of encoding "range", as strings for "hash" (so "007"
    stays itself), and as the log's beginning suggests while the table has no encoding yet.
    """
    types: dict[str, pa.DataType] = {}
    for name, column in schema.columns.items():
        source = column.source or name
        if column.kind == "ignore" or source not in log.types:
            continue
        kind = log.types[source]
        encoding = schema.tables[column.table].encoding if column.table else None
        if column.kind in ("numeric", "weight", "baseline"):
            kind = pa.float64()
        elif column.kind in ("group", "list") or encoding == "hash":
            kind = pa.string()
        elif encoding == "range":
            kind = pa.int64()
        if types.setdefault(source, kind) != kind:  # a column that serves twice
            types[source] = pa.string() if pa.string() in (kind, types[source]) else log.types[source]
    return types


def _expand(text: str) -> list[Path]:
    path = Path(text)
    if path.is_dir():
        found = sorted(p for p in path.iterdir() if p.is_file() and p.name[0] not in "._" and p.suffix != ".json")
    elif path.exists():
        found = [path]
    else:
        found = [Path(match) for match in sorted(glob.glob(text, recursive=True)) if Path(match).is_file()]
    if not found:
        raise UserError(
            f"{text}: no such file; check the path" if not path.is_dir() else f"{text}: holds no files; name a log"
        )
    return found


def _words(source: Source) -> str:
    text = source.format if source.header or source.format in ("parquet", "criteo") else f"{source.format} (no header)"
    return f"{text} of {len(source.names)} columns" if source.names else text


def _detect(file: Path, source: Source | None) -> Source:
    with file.open("rb") as raw:
        if raw.read(4) == b"PAR1":
            return Source(format="parquet")
    if source is not None and source.format != "parquet":
        return source
    lines = _head(file)
    if not lines or not lines[0].strip():
        raise UserError(f"{file}: empty; give a log with at least one row")
    if any("\0" in line for line in lines):
        raise UserError(f"{file}: neither Parquet nor text; convert it to Parquet or CSV")
    delimiter = "\t" if "\t" in lines[0] else ","
    csv.field_size_limit(1 << 24)
    first, *rest = csv.reader(lines, delimiter=delimiter)
    if len(first) == 1 and (other := next((d for d in ";|" if d in first[0]), None)):
        raise UserError(f"{file}: looks separated by {other!r}; write it with commas (.csv) or tabs (.tsv)")
    if len(first) == len(CRITEO) and delimiter == "\t" and first[0] in ("0", "1"):
        return Source(format="criteo", header=False, names=CRITEO)
    header = _is_header(first, rest[0] if rest else [])
    names = () if header else tuple(f"c{i}" for i in range(len(first)))
    return Source(format="tsv" if delimiter == "\t" else "csv", header=header, names=names)


def _head(file: Path) -> list[str]:
    try:
        with pa.input_stream(str(file), compression=_SUFFIXES.get(file.suffix)) as stream:
            start = stream.read(1 << 20)
        start.partition(b"\n")[0].decode("utf-8")  # the columns' names; Arrow looks at the rest
        return start.decode("utf-8-sig", errors="replace").splitlines()[:2]
    except UnicodeDecodeError:
        raise UserError(f"{file}: its first line is not UTF-8; convert it, as by iconv -f latin1 -t utf-8") from None
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error}; check that it is whole and named as compressed") from None


def _is_header(first: list[str], second: list[str]) -> bool:
    """All cells of the first line are texts, and below one of them is a number or they look like distinct names."""

    def is_number(cell: str) -> bool:
        return re.fullmatch(r"\s*[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?\s*|\s*(nan|inf)\s*", cell) is not None

    if any(is_number(cell) or not cell.strip() for cell in first):
        return False
    names = len(set(first)) == len(first) and all(re.fullmatch(r"[^\W\d][\w .:/-]*", cell) for cell in first)
    return names or any(map(is_number, second))


def _parquet(file: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(file)
    except pa.ArrowInvalid as error:
        raise UserError(f"{file}: not a whole Parquet file: {_first_line(error)}; write it again") from None


def _parquet_batches(file: Path, names: list[str]) -> Iterator[pa.RecordBatch]:
    with _parquet(file) as parquet:
        known = parquet.schema_arrow.names
        for name in names:
            if name not in known:
                raise UserError(f"{file}: no column {name!r}{suggest(name, known)}")
        try:
            yield from parquet.iter_batches(batch_size=_BATCH_ROWS, columns=names)
        except (pa.ArrowInvalid, OSError) as error:
            raise UserError(f"{file}: damaged Parquet: {_first_line(error)}; write it again") from None


def _text_batches(
    file: Path, source: Source, types: Mapping[str, pa.DataType] | None, block_bytes: int
) -> Iterator[pa.RecordBatch]:
    names = list(CRITEO if source.format == "criteo" else source.names)
    read = pacsv.ReadOptions(block_size=block_bytes, column_names=[] if source.header else names)
    if not source.header and not names:
        read.autogenerate_column_names = True
    dialect = pacsv.ParseOptions(delimiter="," if source.format == "csv" else "\t")
    if source.format == "criteo":
        dialect.quote_char = False
        types = types or {name: pa.string() if name[0] == "C" else pa.int64() for name in names}
    convert = pacsv.ConvertOptions(null_values=MISSING, strings_can_be_null=True)
    if types is not None:
        convert.column_types, convert.include_columns = dict(types), list(types)
    rows = 0
    try:
        with pacsv.open_csv(str(file), read_options=read, parse_options=dialect, convert_options=convert) as reader:
            for batch in reader:
                if batch.num_rows:
                    yield batch
                rows += batch.num_rows
    except (pa.ArrowInvalid, pa.ArrowKeyError, OSError) as error:
        names = names or next(csv.reader(_head(file), delimiter=dialect.delimiter), [])
        raise UserError(f"{file}, after row {rows}: {_explain(error, names)}") from None


def _explain(error: Exception, names: list[str]) -> str:
    """Arrow's words with the column's name for its number in the file, and a remedy."""
    text = _first_line(error)
    if found := re.search(r"In CSV column #(\d+): (?:Row #(\d+): )?CSV conversion error to (\w+): (.*)", text):
        column = names[int(found[1])] if int(found[1]) < len(names) else f"#{found[1]}"
        row = f", line {found[2]}" if found[2] else ""
        remedy = "mend the row, or make the column categorical with encoding = 'hash' for its table in the schema"
        return f"column {column!r}{row}: {found[4]} where {found[3]} is expected; {remedy}"
    if "include_columns" in text:
        return f"{text}; all files of a log need the same columns"
    return f"{text}; mend the file"


def _first_line(error: Exception) -> str:
    return str(error.args[0]).splitlines()[0]
