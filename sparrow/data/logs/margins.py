"""What spreadsheets and reports write around a table of text: comments, `sep=;`, titles, totals."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from itertools import zip_longest

from sparrow.core.errors import UserError
from sparrow.data.shaping.repair import shorten

DELIMITERS = "\t,;|"
PREAMBLE_CHARS = 1 << 14  # that may be above the header; less than a stream's first block
TOTALS = "look like totals of those above, and count as rows; delete the line unless it is a row"
_SEPARATOR = re.compile(r'"?sep=(.)"?\s*', re.IGNORECASE)
_WORDS = (
    "total",
    "totals",
    "grand total",
    "subtotal",
    "sum",
    "summe",
    "gesamt",
    "totale",
    "suma",
    "итого",
    "合计",
)


def preamble_of(text: str) -> list[str]:
    """Returns the lines before the header: blank ones, comments that begin with #, and `sep=;` of
    spreadsheets.

    A line with # is the header or a row, and no comment, when it has as many cells as the line
    below it, and that does not look like a header.
    """
    lines: list[str] = re.findall(r"[^\r\n]*(?:\r\n|\r|\n)", text[:PREAMBLE_CHARS])
    count = 0
    stated = ""
    for line in lines:
        separator = _SEPARATOR.fullmatch(line) if not "".join(lines[:count]).strip() else None
        if line.strip() and line[0] != "#" and not separator:
            break
        stated = separator[1] if separator else stated
        count += 1
    below = text[sum(map(len, lines[:count])) :].splitlines(keepends=True)[:20]
    if not count or not below or below[0][0] == "#":
        return []
    delimiter = max(stated or DELIMITERS, key=below[0].count)
    first, *rest = [row for row in csv.reader(below, delimiter=delimiter) if row]
    if len(first) > 1 and not is_header(first, rest):
        while (
            count
            and lines[count - 1][0] == "#"
            and lines[count - 1].count(delimiter) == len(first) - 1
        ):
            count -= 1
    return lines[:count]


def separator_of(preamble: Sequence[str]) -> str | None:
    """Returns what parts cells, if a line above the header says it."""
    return next((match[1] for line in preamble if (match := _SEPARATOR.fullmatch(line))), None)


def refuse_title(name: str, lines: list[str], known: str | None, before: int) -> None:
    """Refuses lines above a table that have fewer cells than all lines below them, such as a
    report's title.

    Args:
        name: the file's.
        lines: its first ones.
        known: the delimiter, if it is known.
        before: how many lines are above these.
    """
    titles: list[tuple[int, int]] = []
    for delimiter in [known] if known else DELIMITERS:
        widths = [len(row) for row in csv.reader(lines[:20], delimiter=delimiter) if row]
        width = widths[-1]
        first = max((i + 1 for i, count in enumerate(widths) if count != width), default=0)
        if width > 1 and first == 0:
            return
        if width > 1 and len(widths) - first >= 3 and max(widths[:first]) < width:
            titles.append((width, widths[0]))
    if titles:
        width, cells = max(titles)
        fault = (
            f"{shorten(lines[0].strip())} is {cells} of the {width} cells that the lines below it"
            " have"
        )
        raise UserError(
            f"{name}, line {before + 1}: {fault}; mend it, or begin it with # if it is a comment"
        )


def is_header(first: list[str], rest: list[list[str]]) -> bool:
    """Returns whether a text's first line is a header.

    All of its cells are texts then, and below one of them is a number, or they look like distinct
    names.
    Blank cells below it are passed over, so that a column such as `Rating` may begin with rows that
    lack it.
    """

    def is_number(cell: str) -> bool:
        return (
            re.fullmatch(r"\s*[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?\s*|\s*(nan|inf)\s*", cell)
            is not None
        )

    # pandas writes its index without a name
    first = first[1:] if len(first) > 1 and not first[0].strip() else first
    if any(is_number(cell) or not cell.strip() for cell in first):
        return False
    name = r"\s*[^\W\d][\w .:/?!#%&'+*()\[\]$€£-]*"  # such as `Price (€)`, and no address with an @
    names = len(set(first)) == len(first) and all(re.fullmatch(name, cell) for cell in first)
    below = [next(filter(str.strip, column), "") for column in zip_longest(*rest, fillvalue="")]
    return names or any(map(is_number, below))


def is_totals(cells: Sequence[str]) -> bool:
    """Returns whether a row looks like totals of the rows above it: a word for them, and an empty
    cell.
    """
    return (
        bool(cells)
        and cells[0].strip().rstrip(":").lower() in _WORDS
        and not all(map(str.strip, cells))
    )
