"""What `bad_rows = "repair"` leaves out and takes for missing, counted."""

from __future__ import annotations

from dataclasses import dataclass, field

REPAIR = "or prepare with --bad-rows repair"
# stands for bytes that are not of a file's encoding; no text has this noncharacter
GARBLED = "\ufdd0"


@dataclass
class Tally:
    """How often something was repaired, and where first: the file's row, its header counted, and
    the text there.
    """

    count: int = 0
    row: int = 0
    text: str = ""

    def add(self, count: int, row: int, text: str) -> None:
        """Counts some more. The place of the first ones is kept."""
        if not self.count:
            self.row = row
            self.text = shorten(text)
        self.count += count


@dataclass
class Repairs:
    """What one pass over a log repaired. rows: that it read; so rows + left_out are all that the
    files hold.

    rows_made: of these, see `Step`. events: by file and what happened to them, rows of the file.
    lines: by file, those left out for a wrong number of cells. cells: by file and column, those
    taken for missing. comments: by file, lines above its header. breaks: by file, lines that are
    blank or lie within a quoted cell of the line before, and so make no row. starts: of the files
    so far, in order, the rows that were given before them.
    """

    rows: int = 0
    rows_made: int = 0
    events: dict[tuple[str, str], Tally] = field(default_factory=dict)
    lines: dict[str, Tally] = field(default_factory=dict)
    cells: dict[tuple[str, str], Tally] = field(default_factory=dict)
    comments: dict[str, Tally] = field(default_factory=dict)
    breaks: dict[str, int] = field(default_factory=dict)
    starts: list[int] = field(default_factory=list)

    @property
    def left_out(self) -> int:
        """How many rows of the files the pass did not give."""
        return sum(tally.count for tally in self.lines.values())

    @property
    def has_notes(self) -> bool:
        """Whether the pass repaired or passed over something."""
        return any((self.events, self.lines, self.cells, self.comments, self.breaks))

    def clear(self) -> None:
        """Begins a pass."""
        self.rows = self.rows_made = 0
        by_place = (self.events, self.lines, self.cells, self.comments, self.breaks, self.starts)
        for counts in by_place:
            counts.clear()


def shorten(text: str) -> str:
    """Returns a value as an error quotes it: on one line and not too long."""
    text = text.replace(GARBLED, "\ufffd")
    return repr(text if len(text) <= 40 else text[:37] + "...")
