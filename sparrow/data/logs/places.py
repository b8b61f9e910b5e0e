"""Places of rows in the files of a log: in errors with a remedy, and in notes of what was
repaired.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from sparrow.core.errors import UserError, complaint, first_line
from sparrow.data.logs.files import File
from sparrow.data.logs.read import Log
from sparrow.data.logs.text import ENCODING, TextStream, delimiter_of, quoting_of, read_head
from sparrow.data.shaping.repair import REPAIR, Repairs, shorten
from sparrow.features.schema import Source


def located(log: Log, error: UserError, row0: int) -> UserError:
    """Returns what `Log.located` does."""
    row_words = re.search(r", row (\d+):", str(error))
    if not row_words or not log.files:
        return error
    row = int(row_words[1]) - row0
    if log.source.candidates:
        return _candidate_located(log, str(error), row_words[0], row)
    starts = log.repairs.starts or [0] * (len(log.files) == 1)
    if not starts:  # of a sample of several files nobody knows where they begin
        return error
    start, i = max((start, i) for i, start in enumerate(starts) if start <= row)
    return UserError(f"{log.files[i]}, {place_of(log, log.files[i], row - start)}: {error}")


def _candidate_located(log: Log, text: str, row_words: str, shaped_row: int) -> UserError:
    """Returns an error about a made row, which `row_words` names, with file, row and candidate.
    Reads lists again.
    """
    bare = replace(log, repairs=Repairs())
    for rows in bare.shaped_rows({}, bare.read_rows):
        if shaped_row < len(rows.row_N):
            row = int(rows.row_N[shaped_row])
            candidate = shaped_row - int(np.searchsorted(rows.row_N, row))
            return UserError(
                f"{rows.file}, {rows.place(row)}:"
                f" {text.replace(row_words, f', candidate {candidate}:')}"
            )
        shaped_row -= len(rows.row_N)
    return UserError(text)


def repair_notes(log: Log) -> list[str]:
    """Returns what the last pass over a log repaired, a line each, with the place where it happened
    first.
    """
    repairs = log.repairs
    notes: list[str] = []
    for file in log.files or ("the table",):
        cells = {name: tally for (path, name), tally in repairs.cells.items() if path == str(file)}
        left_out = repairs.lines.get(str(file))
        rows = {tally.row for tally in (*cells.values(), *([left_out] if left_out else []))}
        if isinstance(file, File) and log.source.format != "parquet":
            unit = "line"
            numbers = line_numbers(file, log.source, rows) if rows else {}
        else:
            unit = "row"
            numbers = {row: row for row in rows}
        if left_out:
            first = f"first at {unit} {numbers[left_out.row]}: {left_out.text}"
            notes.append(
                f"{file}: {left_out.count:,} lines left out (wrong number of cells), {first}"
            )
        for name, tally in cells.items():
            first = f"first at {unit} {numbers[tally.row]}: {tally.text}"
            notes.append(f"{file}: {tally.count:,} cells of {name!r} taken for missing, {first}")
        for (name, event), tally in repairs.events.items():
            if name == str(file):
                first = (
                    "first at"
                    f" {place_of(log, file if isinstance(file, File) else None, tally.row)}:"
                    f" {tally.text}"
                )
                notes.append(f"{file}: {tally.count:,} rows {event}, {first}")
        if comments := repairs.comments.get(str(file)):
            notes.append(
                f"{file}: {comments.count:,} lines of comments above the header, first:"
                f" {comments.text}"
            )
        if spare := repairs.breaks.get(str(file)):
            notes.append(
                f"{file}: {spare:,} lines are blank or lie within a quoted cell; they are no rows"
            )
    return notes


def place_of(log: Log, file: File | None, row: int) -> str:
    """Returns where a row of a file is; by its line, if that can be known. file: None for a table
    in memory.
    """
    if file is None or log.source.format == "parquet" or str(file) in log.repairs.lines:
        return f"row {row}"
    number = row + 1 + log.source.header
    return f"line {line_numbers(file, log.source, {number})[number]}"


def line_numbers(file: File, source: Source, rows: set[int]) -> dict[int, int]:
    """Returns row -> the line on which it begins, both counted from 1 with the header.

    They differ only after blank lines and quoted line breaks. A file without them is not read
    again.
    """
    source = replace(source, bad_rows="repair")
    stream = TextStream(file, source, preamble=len(read_head(file, source)[2]))
    last = max(rows)
    lines = {}
    text = io.TextIOWrapper(io.BufferedReader(stream), "utf-8", errors="replace", newline="")
    reader = csv.reader(text, delimiter=delimiter_of(source), quoting=quoting_of(source))
    row = before = 0
    for cells in reader:
        if cells:
            row += 1
            if row in rows:
                lines[row] = before + 1
            if row == last:
                break
        before = reader.line_num
    return {n: lines.get(n, n) for n in rows}


def open_quote_error(file: File, source: Source, row: int) -> UserError:
    """Returns the error of a quote that is opened in a row and never closed."""
    line = line_numbers(file, source, {row})[row]
    return UserError(
        f"{file}, line {line}: a quote is opened there and never closed; mend the line"
    )


def decoding_error(error: UnicodeDecodeError, file: File, source: Source, lines: int) -> UserError:
    """Returns the error of a byte that is not in the file's encoding. lines: how many were read
    before.
    """
    line = lines + error.object[: error.start].decode(source.encoding, "ignore").count("\n") + 1
    byte = f"byte 0x{error.object[error.start]:02X}"
    return UserError(
        f"{file}, line {line}: {byte} cannot be {source.encoding}; {ENCODING}, {REPAIR}"
    )


def reading_error(
    error: Exception,
    file: File,
    source: Source,
    names: Sequence[str],
    stream: TextStream,
    row: int,
    swallowed: bool,
) -> UserError:
    """Returns Arrow's complaint with the file's line, the column's name and a remedy.

    row: of the file, read before it. swallowed: the bad row reaches to the file's end.
    """
    text = complaint(error)
    if "straddl" in text or "out of sync" in text:
        return UserError(
            f"{file}, after row {row}: a row without an end; is a quote opened there and never"
            " closed?"
        )
    bad_row = re.search(r"Row #(\d+): (.*)", str(error), re.DOTALL)
    if bad_row is None:
        return UserError(f"{file}, after row {row}: {text}; check that the file is whole")
    number = int(bad_row[1])
    reason = bad_row[2]
    line = number if stream.plain else line_numbers(file, source, {number})[number]
    place = f"{file}, line {line}"
    if swallowed:
        return UserError(f"{place}: a quote is opened there and never closed; mend the line")
    if cells := re.match(r"Expected (\d+) columns, got (\d+): (.*)", reason, re.DOTALL):
        expected, count, value = cells.groups()
        reason = f"{count} cells where {expected} are expected ({shorten(value)})"
        return UserError(f"{place}: {reason}; mend the line, {REPAIR}")
    column = re.search(r"In CSV column #(\d+)", text)
    name = names[int(column[1])] if column and int(column[1]) < len(names) else "?"
    if value := re.match(r"CSV conversion error to (\S+): invalid value '(.*)'", reason, re.DOTALL):
        choice = "make the column categorical, of a table whose encoding is of kind 'vocabulary'"
        remedy = f"mend it, {REPAIR}, name it in the column's `missing`, or {choice}"
        return UserError(
            f"{place}: column {name!r} has {shorten(value[2])} where {value[1]} is expected;"
            f" {remedy}"
        )
    return UserError(
        f"{place}: column {name!r}: {first_line(Exception(reason))}; mend it, {REPAIR}"
    )
