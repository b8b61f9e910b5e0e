"""What may be done to a log's rows on their way from the files: a stream of `Rows` through a chain
of steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import pyarrow as pa

from sparrow.core.arrays import Bools, Int64s
from sparrow.core.errors import UserError
from sparrow.data.shaping.repair import Repairs, Tally
from sparrow.features.schema import Source
from sparrow.features.types import is_nested

Types = dict[str, pa.DataType]

# what candidates make: the label, and which row they come from
CLICKED = "clicked"
REQUEST = "request"


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """Some rows of one file, perhaps made of the rows that it holds.

    batch: [N]. row_N: the row of the file, counted from 0, that each was made of; they never fall.
    file: its name. number: its place among the log's files. place: where a row of the file is, in
    words.
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

    def with_columns(self, columns: Mapping[str, pa.Array]) -> Rows:
        """Returns the same rows with these columns."""
        return replace(self, batch=pa.RecordBatch.from_pydict(dict(columns)))


def count_event(repairs: Repairs, rows: Rows, places: Int64s, event: str, text: str) -> None:
    """Counts what happened to some of the rows. places: of these rows; text: that of the first
    one.
    """
    if len(places):
        tally = repairs.events.setdefault((rows.file, event), Tally())
        tally.add(len(places), rows.row(int(places[0])), text)


class Step(Protocol):
    """Something that is done to rows."""

    def types(self) -> Types:
        """Returns the columns that rows have after the step."""

    def needs(self, wanted: Types) -> Types:
        """Returns the columns that rows must have before it, so that they have those that are
        wanted after it.

        The types are those that text is read as.
        """

    def apply(self, stream: Iterator[Rows], wanted: Types, repairs: Repairs) -> Iterator[Rows]:
        """Yields the rows after the step, which have the wanted columns.

        `repairs` counts what a person should know.

        Raises:
            UserError: for a row with which it cannot be done.
        """

    def check(self, logs: Sequence[Shaped]) -> None:
        """Refuse logs with which it makes no sense, before they are prepared.

        Args:
            logs: one, or those of train, valid and test, which are read alike.

        Raises:
            UserError: says why.
        """

    def notes(self) -> list[str]:
        """Returns what a person should know of the last pass that is in no file of the log, a line
        each.
        """


class Shaped(Protocol):
    """What a kind of step sees of a `Log`."""

    @property
    def source(self) -> Source:
        """How its rows are read and made."""

    @property
    def types(self) -> Types:
        """Its columns."""

    @property
    def name(self) -> str:
        """What errors call it."""

    @property
    def left_out(self) -> Mapping[str, str]:
        """Columns of types that are not read, and what is said of each."""

    @property
    def repairs(self) -> Repairs:
        """Of the last pass."""

    def batches(self, types: Types) -> Iterator[pa.RecordBatch]:
        """See `Log.batches`."""

    def sample(self, rows: int) -> pa.Table:
        """See `Log.sample`."""

    def notes(self) -> list[str]:
        """See `Log.notes`."""

    def located(self, error: UserError, row0: int) -> UserError:
        """See `Log.located`."""

    def anew(self) -> Shaped:
        """Returns the log with nothing counted yet."""

    def side(self, file: str) -> Shaped:
        """Returns the log of a side table, which is read as this one is."""

    def then(self, step: Step, **changes: Any) -> Shaped:
        """Returns the log with one more step, and with other changes."""


def _has_structs(log: Shaped) -> bool:
    return any(is_nested(kind) for kind in log.types.values())


def _may_have_candidates(log: Shaped) -> bool:
    """A column that is joined may be one of lists, which are candidates then."""
    source = log.source
    return bool(source.joins) if source.candidates is None else bool(source.candidates)


def _has_joins(log: Shaped) -> bool:
    return bool(log.source.joins)


KINDS: dict[str, Callable[[Shaped], bool]] = {
    "structs": _has_structs,
    "candidates": _may_have_candidates,
    "joins": _has_joins,
}
"""What makes a log's rows of those of its files, in order: a file here, and whether a log needs it.

Such a log loads the file. Its function `shape(log, is_earlier)` returns the log with the step.
is_earlier: see `Log.shaped`.
"""
