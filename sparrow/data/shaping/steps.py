"""What may be done to a log's rows on their way from the files: a stream of `Rows` through a chain of steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import pyarrow as pa

from sparrow.core.arrays import Bools, Int64s
from sparrow.data.shaping.repair import Repairs, Tally

Types = dict[str, pa.DataType]


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """Some rows of one file, perhaps made of the rows that it holds.

    batch: [N]. row_N: the row of the file, counted from 0, that each was made of; they never fall. file: its name.
    number: its place among the log's files. place: where a row of the file is, in words.
    """

    batch: pa.RecordBatch
    row_N: Int64s
    file: str
    number: int
    place: Callable[[int], str]

    def row(self, i: int) -> int:
        """Returns the row of the file that one was made of."""
        return int(self.row_N[i])

    def where(self, keep_N: Bools) -> Rows:
        """Returns the rows for which `keep_N` is true."""
        return replace(self, batch=self.batch.filter(pa.array(keep_N)), row_N=self.row_N[keep_N])

    def of(self, columns: Mapping[str, pa.Array]) -> Rows:
        """Returns the same rows with these columns."""
        return replace(self, batch=pa.RecordBatch.from_pydict(dict(columns)))


def tell(repairs: Repairs, rows: Rows, which: Int64s, what: str, text: str) -> None:
    """Counts what happened to some of the rows. which: their places; text: that of the first one."""
    if len(which):
        repairs.told.setdefault((rows.file, what), Tally()).add(len(which), rows.row(int(which[0])), text)


class Step(Protocol):
    """Something that is done to rows."""

    def types(self) -> Types:
        """Returns the columns that rows have after the step."""

    def needs(self, wanted: Types) -> Types:
        """Returns the columns that rows must have before it, so that they have those that are wanted after it.

        The types are those that text is read as.
        """

    def made(self, stream: Iterator[Rows], wanted: Types, repairs: Repairs) -> Iterator[Rows]:
        """Yields the rows after the step, which have the wanted columns.

        `repairs` counts what a person should know.

        Raises:
            UserError: for a row with which it cannot be done.
        """

    def notes(self) -> list[str]:
        """Returns what a person should know of the last pass that is in no file of the log, a line each."""
