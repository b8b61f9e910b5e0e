"""Numbers beyond what training saw: clipped to its range, and counted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from sparrow.core.arrays import Float64s
from sparrow.features.schema import Column, Schema


@dataclass
class Clipped:
    """How many numbers of each column were clipped, and the first of them: its row in the log and its value."""

    found: dict[str, tuple[int, int, float]] = field(default_factory=dict)

    def add(self, name: str, column: Column, x_N: Float64s, row0: int) -> None:
        """Looks at the numbers of a column.

        Args:
            name: the column's.
            column: says what training's range is.
            x_N: the numbers.
            row0: the log's row of the first one.
        """
        if column.low is not None and column.high is not None:
            beyond = np.flatnonzero((x_N < column.low) | (x_N > column.high))
            if len(beyond):
                self._take(name, len(beyond), row0 + int(beyond[0]), float(x_N[beyond[0]]))

    def merge(self, other: Clipped) -> None:
        """Takes in what another one counted in other rows."""
        for name, (count, row, value) in other.found.items():
            self._take(name, count, row, value)

    def _take(self, name: str, count: int, row: int, value: float) -> None:
        before, *first = self.found.get(name, (0, row, value))
        first_row, first_value = min((row, value), (int(first[0]), float(first[1])))
        self.found[name] = before + count, first_row, first_value

    def notes(self, schema: Schema) -> Iterator[str]:
        """Yields a line for each column."""
        for name, (count, row, value) in sorted(self.found.items()):
            column = schema.columns[name]
            numbers = "number" if count == 1 else "numbers"
            clipped = f"{count:,} {numbers} beyond training's range, clipped to {column.low:g} .. {column.high:g}"
            yield f"{name}: {clipped}; the first is {value:g} in row {row:,}"

    def save(self, path: Path) -> None:
        """Writes the counts, for `load` in another process."""
        path.write_text(json.dumps(self.found), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Clipped:
        """Returns what `save` wrote."""
        return cls({name: tuple(item) for name, item in json.loads(path.read_text(encoding="utf-8")).items()})
