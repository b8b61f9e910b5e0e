"""What `bad_rows = "repair"` leaves out and takes for missing, counted; and the values that do not convert."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparrow.core.arrays import Bools
from sparrow.features.ids import is_text
from sparrow.features.numeric import misfits

REPAIR = "or prepare with --bad-rows repair"
GARBLED = "\ufdd0"  # stands for bytes that are not of a file's encoding; no text has this noncharacter
_LARGEST = float(np.finfo(np.float32).max)


@dataclass
class Tally:
    """How often something was repaired, and where first: the file's row, its header counted, and the text there."""

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
    """What one pass over a log repaired. rows: that it read; so rows + left_out are all that the files hold.

    given: rows that were made of these, see `Step`. told: by file and what happened to them, rows of the file.
    lines: by file, those left out for a wrong number of cells. cells: by file and column, those taken for missing.
    breaks: by file, lines that are blank or lie within a quoted cell of the line before, and so make no row.
    starts: of the files so far, in order, the rows that were given before them.
    """

    rows: int = 0
    given: int = 0
    told: dict[tuple[str, str], Tally] = field(default_factory=dict)
    lines: dict[str, Tally] = field(default_factory=dict)
    cells: dict[tuple[str, str], Tally] = field(default_factory=dict)
    breaks: dict[str, int] = field(default_factory=dict)
    starts: list[int] = field(default_factory=list)

    @property
    def left_out(self) -> int:
        """How many rows of the files the pass did not give."""
        return sum(tally.count for tally in self.lines.values())

    def clear(self) -> None:
        """Begins a pass."""
        self.rows = self.given = 0
        for counts in (self.told, self.lines, self.cells, self.breaks, self.starts):
            counts.clear()


def repaired(batch: pa.RecordBatch, types: dict[str, pa.DataType]) -> tuple[pa.RecordBatch, dict[str, list[int]]]:
    """Returns the batch with its text columns as `types`, and column -> the rows whose values did not fit.

    Those values are missing now. White space around text is cut before it is read as a number. Numbers that float32
    cannot hold do not fit either.
    """
    columns, bad = [], {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        kind = types.get(name, column.type)
        if is_text(column.type):
            column, wrong_N = converted(column, kind)
            if wrong_N.any():
                bad[name] = np.flatnonzero(wrong_N).tolist()
        columns.append(column)
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names), bad


def converted(column: pa.Array, kind: pa.DataType) -> tuple[pa.Array, Bools]:
    """Returns a text or binary array [N] as `kind`, and bool [N]: where a value did not convert and is missing now."""
    encoded = column.dictionary_encode()  # each distinct value is looked at once
    values, bad_U = _cast(encoded.dictionary, pa.string())
    garbled_U = pc.match_substring(values, GARBLED).fill_null(False)
    values, bad_U = pc.if_else(garbled_U, None, values), bad_U | garbled_U.to_numpy(zero_copy_only=False)
    if not is_text(kind):
        values, worse_U = _cast(pc.utf8_trim_whitespace(values), kind)
        bad_U = bad_U | worse_U
    if pa.types.is_floating(kind):
        huge_U = pc.greater(pc.abs(values), _LARGEST).fill_null(False).to_numpy(zero_copy_only=False)
        values, bad_U = pc.if_else(pa.array(huge_U), None, values), bad_U | huge_U
    where = np.append(bad_U, False)  # the last one is for missing values
    indices = encoded.indices.fill_null(len(bad_U)).to_numpy(zero_copy_only=False)
    return values.take(encoded.indices), where[indices]


def _cast(values: pa.Array, kind: pa.DataType) -> tuple[pa.Array, Bools]:
    bad_U = np.zeros(len(values), bool)
    bad_U[misfits(values, kind)] = True
    return pc.if_else(pa.array(bad_U), None, values).cast(kind) if bad_U.any() else values.cast(kind), bad_U


def shorten(text: str) -> str:
    """Returns a value as an error quotes it: on one line and not too long."""
    text = text.replace(GARBLED, "\ufffd")
    return repr(text if len(text) <= 40 else text[:37] + "...")
