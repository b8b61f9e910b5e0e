"""CSV, TSV and their kin: how a file is written, and its rows as record batches, none lost without a word."""

from __future__ import annotations

import codecs
import csv
import io
import re
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Literal

import pyarrow as pa
import pyarrow.csv as pacsv

from sparrow.core.errors import UserError
from sparrow.data.logs.files import File, first_line
from sparrow.data.shaping.repair import GARBLED, REPAIR, Repairs, Tally, repaired, shorten
from sparrow.features.schema import Source

CRITEO = ("label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27)))
_MISSING = ("", "NA", "N/A", "#N/A", "NaN", "nan", "NULL", "null", "None", "\\N")
MISSING = [*_MISSING, *(f" {text}" for text in _MISSING)]  # some write a blank behind each comma

_HEAD_BYTES = 1 << 20
_ENCODING = "set encoding in the schema's [source] to what it is, such as 'latin-1', 'cp1252' or 'utf-16'"
_END = "\x1e end of the log \x1e"  # a line put after the file's last one; it comes out unless a quote is still open

csv.field_size_limit(1 << 30)


def dialect(file: File, told: Source) -> tuple[Source, tuple[str, ...]]:
    """Returns how a text file is written, and its columns' names.

    Args:
        file: the file.
        told: what is obeyed. Where it says Parquet, format, delimiter and header are found out.

    Raises:
        UserError: for a file that is empty, binary, or not in its encoding.
    """
    source = told
    if told.format == "parquet":
        source = Source(format="csv", delimiter=told.delimiter, encoding=told.encoding, bad_rows=told.bad_rows)
    source, lines = _head(file, source)
    if told.format == "parquet":
        if re.match(r"\s*(\[\s*)?\{\s*(\"|$)", lines[0]) or lines[0].strip() == "[":
            raise UserError(f"{file}: JSON, which is not read; convert it to Parquet, with pyarrow.json for instance")
        source = _found(lines, source)
    names = CRITEO if source.format == "criteo" else source.names
    if source.header:
        names = tuple(name.strip() for name in _cells(lines, source)[0])
    elif not names:
        names = tuple(f"c{i}" for i in range(len(_cells(lines, source)[0])))
        source = replace(source, names=names)
    return source, names


def text_batches(
    file: File,
    source: Source,
    names: Sequence[str],
    types: Mapping[str, pa.DataType] | None,
    block_bytes: int,
    repairs: Repairs,
    most_bytes: int | None = None,
) -> Iterator[pa.RecordBatch]:
    """Yields a text file's rows in order.

    Args:
        file: the file.
        source: how it is written, and whether to repair what cannot be read.
        names: of its columns.
        types: the wanted columns and their types. When None, all columns are read as their first block suggests.
        block_bytes: how much text is read at a time.
        repairs: counts what is repaired.
        most_bytes: how much of the file is read at most. Then only the first batch is sure to be right.

    Raises:
        UserError: for what cannot be read and is not to be repaired.
    """
    stream, repair = _Stream(file, source, most_bytes), source.bad_rows == "repair"
    skipped: list[int] = []
    mark, marks = stream.end(len(names)), list[str]()

    def ragged(row: pacsv.InvalidRow) -> str:
        if row.text.endswith(mark):
            marks.append(row.text)
            return "skip" if row.text == mark else "error"
        if not repair:
            return "error"
        skipped.append(row.number)
        repairs.lines.setdefault(str(file), Tally()).add(1, row.number, row.text)
        return "skip"

    read = pacsv.ReadOptions(block_size=block_bytes, use_threads=False)  # threads gain nothing and lose line numbers
    read.column_names = [] if source.header else list(names)
    parse = pacsv.ParseOptions(delimiter=_delimiter(source), newlines_in_values=True, invalid_row_handler=ragged)
    if source.format == "criteo":
        parse.quote_char = False
    convert = pacsv.ConvertOptions(null_values=MISSING, strings_can_be_null=True)
    written = dict(zip(names, _cells(_head(file, source)[1], source)[0] if source.header else names, strict=False))
    if types is not None:
        convert.column_types = {written[name]: pa.string() if repair else kind for name, kind in types.items()}
        convert.include_columns = [written[name] for name in types]
    done = int(source.header)  # rows of the file so far, less those skipped
    reader: pacsv.CSVStreamingReader | None = None
    try:
        with pacsv.open_csv(stream, read_options=read, parse_options=parse, convert_options=convert) as reader:
            for batch in reader:
                batch = batch.rename_columns(list(types or names))
                if repair and types is not None:
                    batch = _repair(file, batch, types, done, skipped, repairs)
                done += batch.num_rows
                repairs.rows += batch.num_rows
                if batch.num_rows:
                    yield batch
        if not marks:
            _refuse_open_quote(file, source, done + len(skipped))
    except (pa.ArrowException, OSError) as error:
        swallowed = bool(marks) and marks[-1] != mark
        raise _explained(error, file, source, names, stream, done + len(skipped), swallowed) from None
    finally:
        lines = stream.lines
        stream.close()
        gone = [threading.Event(), threading.Event()]
        weakref.finalize(stream, gone[0].set)
        weakref.finalize(ragged, gone[1].set)
        del stream, ragged, parse
        reader = None
        for event in gone:
            event.wait(1)  # Arrow's thread must be through with it: one that needs Python at its exit never ends
    if (spare := lines - done - len(skipped)) > 0:
        repairs.breaks[str(file)] = spare


def codes_of(file: File, source: Source, names: Sequence[str]) -> list[str]:
    """Returns the columns whose first hundred cells have a number with a zero before it, such as 007, which is a code.

    Args:
        file: the file.
        source: how it is written.
        names: of its columns.
    """
    rows = _cells(_head(file, source)[1], source)[int(source.header) :]
    found = {i for row in rows for i, cell in enumerate(row[: len(names)]) if re.fullmatch(r"\s*0\d+\s*", cell)}
    return [names[i] for i in sorted(found)]


def line_numbers(file: File, source: Source, rows: set[int]) -> dict[int, int]:
    """Returns row -> the line on which it begins, both counted from 1 with the header.

    They differ only after blank lines and quoted line breaks. A file without them is not read again.
    """
    stream = _Stream(file, replace(source, bad_rows="repair"))
    last = max(rows)
    row = 0
    lines = {}
    text = io.TextIOWrapper(io.BufferedReader(stream), "utf-8", errors="replace", newline="")
    reader = csv.reader(text, delimiter=_delimiter(source), quoting=_quoting(source))
    before = 0
    for cells in reader:
        if cells:
            row += 1
            if row in rows:
                lines[row] = before + 1
            if row == last:
                break
        before = reader.line_num
    return {n: lines.get(n, n) for n in rows}


class _Stream(io.RawIOBase):
    """A text file as UTF-8 for Arrow, with a mark after its last line. lines: that it has, once it was read.

    plain: so far there was nothing that makes a row's number another than its line's.
    """

    def __init__(self, file: File, source: Source, most_bytes: int | None = None) -> None:
        self._file = file
        self._source = source
        self._left = most_bytes
        self._raw = file.stream()
        errors = "surrogateescape" if source.bad_rows == "repair" else "strict"
        self._decoder = codecs.getincrementaldecoder(source.encoding)(errors)
        self._mark = ""
        self._tail = b"\n"
        self._rest = b""
        self._over = False
        self.lines = 0
        self.plain = True

    def end(self, columns: int) -> str:
        """Ask for a mark that no row of so many columns can be."""
        self._mark = _END + _delimiter(self._source) * columns
        return self._mark

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        block = self.read(len(buffer))
        buffer[: len(block)] = block
        return len(block)

    def read(self, size: int = -1) -> bytes:
        """`size` bytes, fewer at the end only: Arrow takes them for a block, and keeps a cut row for the next."""
        while (size < 0 or len(self._rest) < size) and not self._over:
            self._rest += self._next(max(size - len(self._rest), 1 << 16))
        size = len(self._rest) if size < 0 else size
        block = self._rest[:size]
        self._rest = self._rest[size:]
        return block

    def _next(self, size: int) -> bytes:
        if self._left is not None:
            size = min(size, self._left)
            self._left -= size
            if not size:
                self._over = True
                return b""
        block = self._raw.read(size)
        self._over = not block
        try:
            text = self._decoder.decode(block, final=self._over)
        except UnicodeDecodeError as error:
            raise _undecoded(error, self._file, self._source, self.lines) from None
        try:
            block = text.encode()
        except UnicodeEncodeError:
            block = re.sub("[\udc80-\udcff]+", GARBLED, text).encode("utf-8", "replace")
        seen = self._tail[-2:] + block
        returns = block.count(b"\r")
        if returns:
            returns -= (self._tail[-1:] + block).count(b"\r\n")
        self.lines += block.count(b"\n") + returns
        self.plain &= not returns and b'"' not in block and b"\n\n" not in seen[1:] and b"\n\r\n" not in seen
        self._tail = seen[-2:]
        if self._over:
            self.lines += self._tail[-1:] not in (b"\n", b"\r")
            block += f"\n{self._mark}\n".encode() if self._mark else b""
        return block

    def close(self) -> None:
        """Close the file under it too."""
        self._raw.close()
        super().close()


def _head(file: File, source: Source) -> tuple[Source, list[str]]:
    """The file's first lines, and the source with its encoding made sure of."""
    if file.size == 0:
        raise UserError(f"{file}: empty; give a log with at least one row")
    try:
        codecs.lookup(source.encoding)
    except LookupError:
        remedy = "give one that Python knows, such as latin-1, cp1252 or utf-16"
        raise UserError(f"source.encoding: no encoding {source.encoding!r}; {remedy}") from None
    try:
        with file.stream() as stream:
            start = stream.read(_HEAD_BYTES)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{file}: cannot be read: {first_line(error)}; check that it is whole") from None
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) and source.encoding == "utf-8":
        source = replace(source, encoding="utf-16")
    decoder = codecs.getincrementaldecoder(source.encoding)("replace" if source.bad_rows == "repair" else "strict")
    try:
        text = decoder.decode(start, final=len(start) < _HEAD_BYTES)
    except UnicodeDecodeError as error:
        raise _undecoded(error, file, source, 0) from None
    if "\ufffd" in text.partition("\n")[0]:
        raise UserError(f"{file}, line 1: not in {source.encoding}; {_ENCODING}")
    if "\0" in text:
        raise UserError(f"{file}: neither Parquet nor text; convert it to Parquet or CSV")
    lines = [line for line in text.removeprefix("\ufeff").splitlines(keepends=True)[:100] if line.strip()]
    if not lines:
        raise UserError(f"{file}: empty; give a log with at least one row")
    return source, lines


def _found(lines: list[str], source: Source) -> Source:
    """The source with format, delimiter and header found out from a file's first lines."""

    def fit(delimiter: str) -> tuple[float, int]:  # cells alike in all lines, and many of them
        rows = list(csv.reader(lines[:20], delimiter=delimiter))
        width = len(rows[0])
        return (sum(len(row) == width for row in rows) / len(rows) if width > 1 else 0, width)

    delimiter = source.delimiter or max("\t,;|", key=fit)
    delimiter = delimiter if source.delimiter or fit(delimiter)[1] > 1 else ","
    if delimiter == "\t":
        source = replace(source, format="tsv", delimiter=None)
    elif delimiter != ",":
        source = replace(source, delimiter=delimiter)
    first, *rest = [row for row in csv.reader(lines, delimiter=delimiter) if row]
    if len(first) == len(CRITEO) and delimiter == "\t" and first[0] in ("0", "1"):
        return replace(source, format="criteo", header=False, names=CRITEO)
    header = _is_header(first, rest)
    return replace(source, header=header, names=() if header else tuple(f"c{i}" for i in range(len(first))))


def _is_header(first: list[str], rest: list[list[str]]) -> bool:
    """All cells of the first line are texts, and below one of them is a number or they look like distinct names.

    Blank cells below it are passed over, so that a column such as `Rating` may begin with rows that lack it.
    """

    def is_number(cell: str) -> bool:
        return re.fullmatch(r"\s*[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?\s*|\s*(nan|inf)\s*", cell) is not None

    first = first[1:] if len(first) > 1 and not first[0].strip() else first  # pandas writes its index without a name
    if any(is_number(cell) or not cell.strip() for cell in first):
        return False
    name = r"\s*[^\W\d][\w .:/?!#%&'+*()\[\]$€£-]*"  # such as `Price (€)`, and no address with an @
    names = len(set(first)) == len(first) and all(re.fullmatch(name, cell) for cell in first)
    below = [next(filter(str.strip, column), "") for column in zip_longest(*rest, fillvalue="")]
    return names or any(map(is_number, below))


def _cells(lines: list[str], source: Source) -> list[list[str]]:
    return [row for row in csv.reader(lines, delimiter=_delimiter(source), quoting=_quoting(source)) if row]


def _delimiter(source: Source) -> str:
    delimiter = source.delimiter or ("," if source.format == "csv" else "\t")
    if len(delimiter) != 1 or not delimiter.isascii() or delimiter in '\r\n"':
        raise UserError(f"source.delimiter: {delimiter!r} cannot part cells; give one ASCII character")
    return delimiter


def _quoting(source: Source) -> Literal[0, 3]:
    return csv.QUOTE_NONE if source.format == "criteo" else csv.QUOTE_MINIMAL


def _repair(
    file: File,
    batch: pa.RecordBatch,
    types: Mapping[str, pa.DataType],
    done: int,
    skipped: Sequence[int],
    repairs: Repairs,
) -> pa.RecordBatch:
    """A batch read as bytes, converted to `types`; cells that do not convert are counted."""
    fixed, bad = repaired(batch, dict(types))
    for name, places in bad.items():
        row = done + places[0] + 1  # as in the file, were none skipped before it
        for number in skipped:
            row += number <= row
        value = batch.column(name)[places[0]].as_py()
        repairs.cells.setdefault((str(file), name), Tally()).add(len(places), row, value)
    return fixed


def _refuse_open_quote(file: File, source: Source, row: int) -> None:
    line = line_numbers(file, source, {row})[row]
    raise UserError(f"{file}, line {line}: a quote is opened there and never closed; mend the line")


def _undecoded(error: UnicodeDecodeError, file: File, source: Source, lines: int) -> UserError:
    line = lines + error.object[: error.start].decode(source.encoding, "ignore").count("\n") + 1
    byte = f"byte 0x{error.object[error.start]:02X}"
    return UserError(f"{file}, line {line}: {byte} cannot be {source.encoding}; {_ENCODING}, {REPAIR}")


def _explained(
    error: Exception, file: File, source: Source, names: Sequence[str], stream: _Stream, row: int, swallowed: bool
) -> UserError:
    """Arrow's complaint with the file's line, the column's name and a remedy.

    row: of the file, read before it. swallowed: the bad row reaches to the file's end.
    """
    text = first_line(error)
    if "straddl" in text or "out of sync" in text:
        return UserError(f"{file}, after row {row}: a row without an end; is a quote opened there and never closed?")
    found = re.search(r"Row #(\d+): (.*)", str(error), re.DOTALL)
    if found is None:
        return UserError(f"{file}, after row {row}: {text}; check that the file is whole")
    number, what = int(found[1]), found[2]
    line = number if stream.plain else line_numbers(file, source, {number})[number]
    place = f"{file}, line {line}"
    if swallowed:
        return UserError(f"{place}: a quote is opened there and never closed; mend the line")
    if cells := re.match(r"Expected (\d+) columns, got (\d+): (.*)", what, re.DOTALL):
        wanted, got, value = cells.groups()
        return UserError(
            f"{place}: {got} cells where {wanted} are expected ({shorten(value)}); mend the line, {REPAIR}"
        )
    column = re.search(r"In CSV column #(\d+)", text)
    name = names[int(column[1])] if column and int(column[1]) < len(names) else "?"
    if value := re.match(r"CSV conversion error to (\S+): invalid value '(.*)'", what, re.DOTALL):
        other = "make the column categorical, of a table whose encoding is of kind 'vocabulary'"
        remedy = f"mend it, {REPAIR}, name it in the column's `missing`, or {other}"
        return UserError(f"{place}: column {name!r} has {shorten(value[2])} where {value[1]} is expected; {remedy}")
    return UserError(f"{place}: column {name!r}: {first_line(Exception(what))}; mend it, {REPAIR}")
