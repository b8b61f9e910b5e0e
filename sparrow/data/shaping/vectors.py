"""Vectors of another size, or with a number that is none, are taken for missing where a log is repaired."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from sparrow.data.shaping.repair import Repairs
from sparrow.data.shaping.steps import Rows, Types, tell
from sparrow.features.numeric import without
from sparrow.features.schema import Column
from sparrow.features.vectors import broken


@dataclass(frozen=True)
class RepairedVectors:
    """The step (see `Step`) that repairs columns. held: those before. vectors: source -> what is made of it."""

    held: Types
    vectors: Mapping[str, Column]

    def types(self) -> Types:
        """See `Step`."""
        return self.held

    def needs(self, wanted: Types) -> Types:
        """See `Step`."""
        return wanted

    def made(self, stream: Iterator[Rows], wanted: Types, repairs: Repairs) -> Iterator[Rows]:
        """See `Step`."""
        for rows in stream:
            columns = dict(zip(rows.batch.schema.names, rows.batch.columns, strict=True))
            for source, column in self.vectors.items():
                raw, size = columns[source], column.size or 0
                bad_N = broken(without(raw, column.missing) if column.missing else raw, source, size, column.separator)
                if bad_N.any():
                    bad = np.flatnonzero(bad_N)
                    what = f"whose {source!r} is no vector of {size} numbers, taken for missing"
                    tell(repairs, rows, bad, what, str(raw[int(bad[0])].as_py()))
                    columns[source] = raw.take(pa.array(np.arange(len(raw)), mask=bad_N))
            yield rows.of(columns)

    def notes(self) -> list[str]:
        """See `Step`."""
        return []
