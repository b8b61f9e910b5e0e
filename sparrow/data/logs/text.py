"""CSV, TSV and their kin: how a file is written, and its rows as record batches, none lost without
a word.
"""

from __future__ import annotations

import codecs
import csv
import io
import re
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import pyarrow as pa
import pyarrow.csv as pacsv

from sparrow.core.errors import UserError, complaint
from sparrow.data import logs, shaping
from sparrow.data.logs.files import File
from sparrow.data.logs.margins import (
    DELIMITERS,
    PREAMBLE_CHARS,
    TOTALS,
    is_header,
    is_totals,
    preamble_of,
    refuse_title,
    separator_of,
)
from sparrow.data.logs.packed import refuse_archive
from sparrow.data.shaping.repair import GARBLED, Repairs, Tally
from sparrow.features.schema import WORDS, Source

CRITEO = ("label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27)))
MISSING = [*WORDS, *(f" {text}" for text in WORDS)]  # some write a blank behind each comma

BLOCK_BYTES = 1 << 22  # that are read at a time
_HEAD_BYTES = 1 << 20
ENCODING = (
    "set encoding in the schema's [source] to what it is, such as 'latin-1', 'cp1252' or 'utf-16'"
)
# a line put after the file's last one; it comes out unless a quote is still open
_END = "\x1e end of the log \x1e"

csv.field_size_limit(1 << 30)


def dialect(file: File, wanted: Source) -> tuple[Source, tuple[str, ...]]:
    """Returns how a text file is written, and its columns' names.

    Args:
        file: the file.
        wanted: what is obeyed. Where it says Parquet, format, delimiter and header are found out.

    Raises:
        UserError: for a file that is empty, binary, or not in its encoding.
    """
    source = wanted
    if wanted.format == "parquet":
        source = Source(
            format="csv",
            delimiter=wanted.delimiter,
            encoding=wanted.encoding,
            bad_rows=wanted.bad_rows,
            cells=wanted.cells,
        )
    source, lines, preamble = read_head(file, source)
    delimiter = delimiter_of(source)
    stated = separator_of(preamble)
    if stated and not source.delimiter and stated != delimiter:
        source = replace(source, delimiter=stated)
    if wanted.format == "parquet":
        if re.match(r"\s*(\[\s*)?\{\s*(\"|$)", lines[0]) or lines[0].strip() == "[":
            raise UserError(
                f"{file}: JSON, which is not read; convert it to Parquet, with pyarrow.json for"
                " instance"
            )
        refuse_title(str(file), lines, source.delimiter, len(preamble))
        source = _with_dialect(lines, source)
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
        types: the wanted columns and their types. When None, all columns are read as their first
            block suggests.
        block_bytes: how much text is read at a time.
        repairs: counts what is repaired.
        most_bytes: how much of the file is read at most. Then only the first batch is sure to be
            right.

    Raises:
        UserError: for what cannot be read and is not to be repaired.
    """
    _, lines, preamble = read_head(file, source)
    stream = TextStream(file, source, most_bytes, len(preamble))
    repair = source.bad_rows == "repair"
    skipped: list[int] = []
    mark = stream.end(len(names))
    marks: list[str] = []

    def ragged(row: pacsv.InvalidRow) -> str:
        if row.text.endswith(mark):
            marks.append(row.text)
            return "skip" if row.text == mark else "error"
        if not repair:
            return "error"
        skipped.append(row.number)
        repairs.lines.setdefault(str(file), Tally()).add(1, row.number, row.text)
        return "skip"

    header = [] if source.header else list(names)  # threads gain nothing and lose line numbers
    read = pacsv.ReadOptions(block_size=block_bytes, use_threads=False, column_names=header)
    parse = pacsv.ParseOptions(
        delimiter=delimiter_of(source), newlines_in_values=True, invalid_row_handler=ragged
    )
    parse.quote_char = source.format != "criteo" and '"'
    titles = _cells(lines, source)[0] if source.header else names
    convert = _conversion(source, dict(zip(names, titles, strict=False)), types)
    rows_read = int(source.header)  # rows of the file so far, less those skipped
    reader: pacsv.CSVStreamingReader | None = None
    try:
        with pacsv.open_csv(
            stream, read_options=read, parse_options=parse, convert_options=convert
        ) as reader:
            for batch in reader:
                batch = batch.rename_columns(list(types or names))
                if repair and types is not None:
                    batch = shaping.conversion.repair_cells(
                        str(file), batch, types, rows_read, skipped, repairs, source
                    )
                rows_read += batch.num_rows
                repairs.rows += batch.num_rows
                if batch.num_rows:
                    yield batch
        if not marks:
            raise logs.places.open_quote_error(file, source, rows_read + len(skipped))
        _count_other_lines(file, source, preamble, stream, rows_read + len(skipped), repairs)
    except (pa.ArrowException, OSError) as error:
        swallowed = bool(marks) and marks[-1] != mark
        row = rows_read + len(skipped)
        raise logs.places.reading_error(
            error, file, source, names, stream, row, swallowed
        ) from None
    finally:
        stream.close()
        gone = [_end_of(stream), _end_of(ragged)]
        del stream, ragged, parse
        reader = None
        for event in gone:
            # Arrow's thread must be through with it: one that needs Python at its exit never ends
            event.wait(1)


def _conversion(
    source: Source, titles: Mapping[str, str], types: Mapping[str, pa.DataType] | None
) -> pacsv.ConvertOptions:
    """Returns how cells become values. titles: name of a column -> as it is written. types: see
    `text_batches`.
    """
    convert = pacsv.ConvertOptions(null_values=MISSING)
    # else the transforms tell words from texts
    convert.strings_can_be_null = types is None or not source.has_words
    if types is not None:
        is_text = source.bad_rows == "repair"
        convert.column_types = {
            titles[name]: pa.string() if is_text else kind for name, kind in types.items()
        }
        convert.include_columns = [titles[name] for name in types]
    return convert


def _end_of(thing: object) -> threading.Event:
    """Returns an event that comes when nobody has a thing any more."""
    event = threading.Event()
    weakref.finalize(thing, event.set)
    return event


def codes_of(file: File, source: Source, names: Sequence[str]) -> list[str]:
    """Returns the columns whose first hundred cells have a number with a zero before it, such as
    007, which is a code.

    Args:
        file: the file.
        source: how it is written.
        names: of its columns.
    """
    rows = _cells(read_head(file, source)[1], source)[int(source.header) :]
    places = {
        i
        for row in rows
        for i, cell in enumerate(row[: len(names)])
        if re.fullmatch(r"\s*0\d+\s*", cell)
    }
    return [names[i] for i in sorted(places)]


class TextStream(io.RawIOBase):
    """A text file as UTF-8 for Arrow, with a mark after its last line. lines: that it has, once it
    was read.

    plain: so far there was nothing that makes a row's number another than its line's. ending: the
    last text that was read. preamble: how many lines there are before the header, which come out
    blank.
    """

    def __init__(
        self, file: File, source: Source, most_bytes: int | None = None, preamble: int = 0
    ) -> None:
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
        self._preamble = preamble
        self.lines = 0
        self.plain = not preamble
        self.ending = ""

    def end(self, columns: int) -> str:
        """Ask for a mark that no row of so many columns can be."""
        self._mark = _END + delimiter_of(self._source) * columns
        return self._mark

    def readable(self) -> bool:
        """See `io.RawIOBase`."""
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """See `io.RawIOBase`."""
        block = self.read(len(buffer))
        buffer[: len(block)] = block
        return len(block)

    def read(self, size: int = -1) -> bytes:
        """`size` bytes, fewer at the end only: Arrow takes them for a block, and keeps a cut row
        for the next.
        """
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
            raise logs.places.decoding_error(error, self._file, self._source, self.lines) from None
        self.ending = (self.ending + text)[-PREAMBLE_CHARS:]
        if self._preamble and text:
            text = re.sub(r"[^\r\n]*(\r\n|\r|\n)", r"\1", text, count=self._preamble)
            self._preamble = 0
        try:
            block = text.encode()
        except UnicodeEncodeError:
            block = re.sub("[\udc80-\udcff]+", GARBLED, text).encode("utf-8", "replace")
        joined = self._tail[-2:] + block
        returns = block.count(b"\r")
        if returns:
            returns -= (self._tail[-1:] + block).count(b"\r\n")
        self.lines += block.count(b"\n") + returns
        has_blank = b"\n\n" in joined[1:] or b"\n\r\n" in joined
        self.plain &= not returns and not has_blank and b'"' not in block
        self._tail = joined[-2:]
        if self._over:
            self.lines += self._tail[-1:] not in (b"\n", b"\r")
            block += f"\n{self._mark}\n".encode() if self._mark else b""
        return block

    def close(self) -> None:
        """Close the file under it too."""
        self._raw.close()
        super().close()


def read_head(file: File, source: Source) -> tuple[Source, list[str], list[str]]:
    """Returns the source with its encoding made sure of, the file's first lines, and those above
    them.

    The latter are told by `preamble_of`.
    """
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
        raise UserError(
            f"{file}: cannot be read: {complaint(error)}; check that it is whole"
        ) from None
    refuse_archive(str(file), start)
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) and source.encoding == "utf-8":
        source = replace(source, encoding="utf-16")
    decoder = codecs.getincrementaldecoder(source.encoding)(
        "replace" if source.bad_rows == "repair" else "strict"
    )
    try:
        text = decoder.decode(start, final=len(start) < _HEAD_BYTES)
    except UnicodeDecodeError as error:
        raise logs.places.decoding_error(error, file, source, 0) from None
    if "\ufffd" in text.partition("\n")[0]:
        raise UserError(f"{file}, line 1: not in {source.encoding}; {ENCODING}")
    if "\0" in text:
        raise UserError(f"{file}: neither Parquet nor text; convert it to Parquet or CSV")
    text = text.removeprefix("\ufeff")
    preamble = preamble_of(text)
    lines = text[sum(map(len, preamble)) :].splitlines(keepends=True)
    lines = [line for line in lines[:100] if line.strip()]
    if not lines:
        raise UserError(f"{file}: empty; give a log with at least one row")
    return source, lines, preamble


def _with_dialect(lines: list[str], source: Source) -> Source:
    """Returns the source with format, delimiter and header found out from a file's first lines."""

    def fit(delimiter: str) -> tuple[float, int]:  # cells alike in all lines, and many of them
        rows = list(csv.reader(lines[:20], delimiter=delimiter))
        width = len(rows[0])
        return (sum(len(row) == width for row in rows) / len(rows) if width > 1 else 0, width)

    delimiter = source.delimiter or max(DELIMITERS, key=fit)
    delimiter = delimiter if source.delimiter or fit(delimiter)[1] > 1 else ","
    if delimiter == "\t":
        source = replace(source, format="tsv", delimiter=None)
    elif delimiter != ",":
        source = replace(source, delimiter=delimiter)
    first, *rest = [row for row in csv.reader(lines, delimiter=delimiter) if row]
    if len(first) == len(CRITEO) and delimiter == "\t" and first[0] in ("0", "1"):
        return replace(source, format="criteo", header=False, names=CRITEO)
    header = is_header(first, rest)
    return replace(
        source, header=header, names=() if header else tuple(f"c{i}" for i in range(len(first)))
    )


def _cells(lines: list[str], source: Source) -> list[list[str]]:
    return [
        row
        for row in csv.reader(lines, delimiter=delimiter_of(source), quoting=quoting_of(source))
        if row
    ]


def delimiter_of(source: Source) -> str:
    """Returns the character between two cells."""
    delimiter = source.delimiter or ("," if source.format == "csv" else "\t")
    if len(delimiter) != 1 or not delimiter.isascii() or delimiter in '\r\n"':
        raise UserError(
            f"source.delimiter: {delimiter!r} cannot part cells; give one ASCII character"
        )
    return delimiter


def quoting_of(source: Source) -> Literal[0, 3]:
    """Returns whether cells may stand in quotes, as `csv` says it."""
    return csv.QUOTE_NONE if source.format == "criteo" else csv.QUOTE_MINIMAL


def _count_other_lines(
    file: File,
    source: Source,
    preamble: Sequence[str],
    stream: TextStream,
    rows: int,
    repairs: Repairs,
) -> None:
    """Counts the lines of a file that are no rows, and a last row that looks like totals. rows:
    with the header.
    """
    comments = [line.strip() for line in preamble if line[0] == "#"]
    if comments:
        repairs.comments.setdefault(str(file), Tally()).add(len(comments), 0, comments[0])
    spare = stream.lines - rows - sum(1 for line in preamble if line.strip())
    if spare > 0:
        repairs.breaks[str(file)] = spare
    last = stream.ending.rstrip("\r\n").splitlines()[-1:]
    if is_totals(next(iter(_cells(last, source)), [])):
        tally = repairs.events.setdefault((str(file), TOTALS), Tally())
        tally.add(1, rows - 1 - source.header, last[0])
