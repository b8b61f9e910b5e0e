"""Numbers beyond what training saw: clipped to its range, and counted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from sparrow.core.arrays import Float64s
from sparrow.core.errors import counted
from sparrow.features.schema import Column, Schema


@dataclass
class Clipped:
    """How many numbers of each column were clipped, and the first of them: its row in the log and
    its value.
    """

    counts: dict[str, tuple[int, int, float]] = field(default_factory=dict)

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
        for name, (count, row, value) in other.counts.items():
            self._take(name, count, row, value)

    def _take(self, name: str, count: int, row: int, value: float) -> None:
        before, *first = self.counts.get(name, (0, row, value))
        first_row, first_value = min((row, value), (int(first[0]), float(first[1])))
        self.counts[name] = before + count, first_row, first_value

    def notes(self, schema: Schema) -> Iterator[str]:
        """Yields a line for each column."""
        for name, (count, row, value) in sorted(self.counts.items()):
            column = schema.columns[name]
            beyond = f"{counted(count, 'number')} beyond training's range"
            clipped = (
                f"clipped to {column.low:g} .. {column.high:g}; the first is {value:g} in row"
                f" {row:,}"
            )
            yield f"{name}: {beyond}, {clipped}"
