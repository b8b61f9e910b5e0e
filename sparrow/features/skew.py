"""How rows differ from those that a schema was fitted on: what a log, or rows to be scored, should
make one look at.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparrow import features
from sparrow.core.arrays import Int64s
from sparrow.core.errors import counted
from sparrow.features.clipped import Clipped
from sparrow.features.encodings import MISSING, UNKNOWN
from sparrow.features.schema import ROLES, Column, Schema

LEAST = 0.01  # of a column's ids that are unknown, from which on it is told
MOST = 6  # columns that are named


class Cells(NamedTuple):
    """What was in a feature's cells: rows, those where it is missing, its ids, and those that its
    table lacks.
    """

    rows: int = 0
    missing: int = 0
    ids: int = 0
    unknown: int = 0


class Far(NamedTuple):
    """Times that are far from training's: how many, and the row and seconds since 1970 of the
    first.
    """

    times: int
    row: int
    seconds: int


@dataclass
class Skew:
    """Counts what is missing, unknown, beyond training's range or far from its times, by column.

    cells: by feature. far: by column of the log. new: columns of the log that the schema does not
    name.
    """

    clipped: Clipped = field(default_factory=Clipped)
    cells: dict[str, Cells] = field(default_factory=dict)
    far: dict[str, Far] = field(default_factory=dict)
    new: tuple[str, ...] = ()

    def add(
        self, schema: Schema, name: str, values: pa.Array, encoded: pa.Array, row0: int
    ) -> None:
        """Looks at a column of some rows.

        Args:
            schema: of the column.
            name: the column's.
            values: the typed rows, with numbers in the place of ids that are counted.
            encoded: what became of them.
            row0: the log's row of the first one.
        """
        column = schema.columns.get(name)
        if column is None or column.kind in ROLES or column.transform == "missing":
            return
        if column.kind == "numeric":
            x_N = values.to_numpy(zero_copy_only=False)
            self.clipped.add(name, column, x_N, row0)
            cells = Cells(len(x_N), int(np.isnan(x_N).sum()))
        elif column.kind == "vector":
            cells = Cells(len(values), values.null_count)
        else:
            cells = _cells(
                column, encoded, is_numbered=schema.encodings[str(column.table)].is_numbered
            )
        self._take(name, cells)

    def add_times(self, schema: Schema, source: str, seconds_N: Int64s, row_N: Int64s) -> None:
        """Looks at times of some rows.

        Args:
            schema: says which times training had.
            source: the times' column of the log.
            seconds_N: the times, in seconds since 1970.
            row_N: the log's row of each.
        """
        limits = schema.times_of(source)
        if limits is not None:
            far = np.flatnonzero(features.times.far_times(seconds_N, *limits))
            if len(far):
                self._take_far(source, Far(len(far), int(row_N[far[0]]), int(seconds_N[far[0]])))

    def merge(self, other: Skew) -> None:
        """Takes in what another one counted in other rows."""
        self.clipped.merge(other.clipped)
        for name, cells in other.cells.items():
            self._take(name, cells)
        for source, far in other.far.items():
            self._take_far(source, far)

    def notes(self, schema: Schema, *, grown: bool = False) -> Iterator[str]:
        """Yields a line for each thing that a person should look at. grown: whether new ids got
        rows.
        """
        yield from self.clipped.notes(schema)
        for source, far in sorted(self.far.items()):
            limits = schema.times_of(source)
            assert limits is not None
            first = (
                f"the first, in row {far.row:,}, is"
                f" {features.times.far_words(far.seconds, *limits)}"
            )
            yield f"{source}: {counted(far.times, 'time')} far from training's; {first}"
        empty = [
            name for name, cells in self.cells.items() if cells.rows and cells.missing == cells.rows
        ]
        if empty:
            yield f"missing in all rows: {first_names(sorted(empty))}"
        if not grown and (
            words := unknown_words((n, c.unknown, c.ids) for n, c in self.cells.items())
        ):
            yield f"ids that their tables do not know: {words}"
        if self.new:
            yield f"columns that the model does not know, and passes over: {first_names(self.new)}"

    def to_dict(self) -> dict[str, Any]:
        """Returns the counts as plain data, without those of clipped numbers."""
        return {"cells": self.cells, "far": self.far, "new": self.new}

    @classmethod
    def from_dict(cls, data: dict[str, Any], clipped: Clipped) -> Skew:
        """Returns what `to_dict` gave."""
        cells = {name: Cells(*item) for name, item in data.get("cells", {}).items()}
        far = {source: Far(*item) for source, item in data.get("far", {}).items()}
        return cls(clipped, cells, far, tuple(data.get("new", ())))

    def save(self, path: Path) -> None:
        """Writes the counts, for `load` in another process."""
        path.write_text(
            json.dumps({"clipped": self.clipped.counts, **self.to_dict()}), encoding="utf-8"
        )

    @classmethod
    def load(cls, path: Path) -> Skew:
        """Returns what `save` wrote."""
        data = json.loads(path.read_text(encoding="utf-8"))
        return cls.from_dict(
            data, Clipped({name: tuple(item) for name, item in data["clipped"].items()})
        )

    def _take(self, name: str, cells: Cells) -> None:
        before = self.cells.get(name, Cells())
        self.cells[name] = Cells(*(a + b for a, b in zip(before, cells, strict=True)))

    def _take_far(self, source: str, far: Far) -> None:
        before = self.far.get(source, Far(0, far.row, far.seconds))
        first = min(before[1:], far[1:])
        self.far[source] = Far(before.times + far.times, *first)


def unknown_words(columns: Iterable[tuple[str, int, int]]) -> str:
    """Returns the columns with the most unknown ids and the share of these; nothing if all have
    few.

    columns: names, with how many ids are unknown, of how many.
    """
    shares = sorted(
        ((bad / ids, name) for name, bad, ids in columns if ids and bad >= LEAST * ids),
        reverse=True,
    )
    return first_names([f"{name} {share:.1%}" for share, name in shares])


def new_columns(schema: Schema, names: Iterable[str]) -> tuple[str, ...]:
    """Returns which of a log's columns a schema does not name. It names those that it ignores,
    too.
    """
    known = {source for name in schema.columns for source in schema.sources(name)}
    # those are Sparrow's
    return tuple(name for name in names if name not in known and not name.startswith(":"))


def _cells(column: Column, encoded: pa.Array, *, is_numbered: bool) -> Cells:
    """Counts ids. A list is missing where it is empty."""
    rows = len(encoded)
    ids = encoded
    missing = None
    if column.kind == "list":
        missing = int(pc.sum(pc.equal(encoded.value_lengths(), 0)).as_py() or 0)
        ids = encoded.flatten()
    ids_M = ids.to_numpy(zero_copy_only=False)
    lacking = len(ids_M) - int(np.count_nonzero(ids_M != MISSING))
    unknown = int(np.count_nonzero(ids_M == UNKNOWN)) if is_numbered and not column.quantiles else 0
    return Cells(rows, lacking if missing is None else missing, len(ids_M) - lacking, unknown)


def first_names(names: Sequence[str]) -> str:
    """Returns the first MOST names, with dots where there are more."""
    return ", ".join(names[:MOST]) + (", ..." if len(names) > MOST else "")
