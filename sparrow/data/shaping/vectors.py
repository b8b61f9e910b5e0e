"""Vectors of another size, or with a number that is none, are taken for missing where a log is
repaired.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from sparrow.data.shaping.repair import Repairs
from sparrow.data.shaping.steps import Rows, Shaped, Types, count_event
from sparrow.features.cells import without_words
from sparrow.features.ids import is_text
from sparrow.features.numeric import without
from sparrow.features.schema import Column
from sparrow.features.vectors import broken


@dataclass(frozen=True)
class RepairedVectors:
    """The step (see `Step`) that repairs columns.

    held: those before. vectors: source -> what is made of it. with_words: whether words for missing
    are none.
    """

    held: Types
    vectors: Mapping[str, Column]
    with_words: bool = False

    def types(self) -> Types:
        """See `Step`."""
        return self.held

    def needs(self, wanted: Types) -> Types:
        """See `Step`."""
        return wanted

    def apply(self, stream: Iterator[Rows], wanted: Types, repairs: Repairs) -> Iterator[Rows]:
        """See `Step`."""
        for rows in stream:
            columns = dict(zip(rows.batch.schema.names, rows.batch.columns, strict=True))
            for source, column in self.vectors.items():
                raw = columns[source]
                size = column.size or 0
                values = without_words(raw) if self.with_words and is_text(raw.type) else raw
                if column.missing:
                    values = without(values, column.missing, with_words=self.with_words)
                bad_N = broken(values, source, size, column.separator)
                if bad_N.any():
                    bad = np.flatnonzero(bad_N)
                    event = f"whose {source!r} is no vector of {size} numbers, taken for missing"
                    count_event(repairs, rows, bad, event, str(raw[int(bad[0])].as_py()))
                    columns[source] = raw.take(pa.array(np.arange(len(raw)), mask=bad_N))
            yield rows.with_columns(columns)

    def check(self, logs: Sequence[Shaped]) -> None:
        """See `Step`."""

    def notes(self) -> list[str]:
        """See `Step`."""
        return []
