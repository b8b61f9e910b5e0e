"""How a row is stored. One file per format: its `Config` is the format, and `encode` and `decode`
its definition.

To add a format, add its file here. For speed add it to the C++ in embedding_bag/cpu/codecs.h too,
and to the Triton in embedding_bag/gpu: a name in its `CODECS` and branches of `load_row` and
`store_row` (codecs.py). Without a name that they know, tables of this format run on the reference.
They round with `numerics.rounding`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from sparrow.core.pages import empty_rows

BLOCK = 1 << 16  # numbers that are converted at a time, so that what is between stays in the caches
Rounding = Literal["nearest", "stochastic"]


@dataclass(frozen=True, kw_only=True)
class Field:
    """One field of a row record: some entries for each row.

    Args:
        width: how many entries a row has; None for a single number.
        dtype: the type of the entries.
        first: their value in a row that was never updated.
        across: what the parts have of it when a layout cuts the table by columns. "cut": each part
            has the entries of its columns. "whole": the entries are of a whole row, so the table
            cannot be cut by columns. "mean" and "max": each part has a number of its own. The
            number of the row is their mean, weighted by columns, or the largest.
        runs: what lies one after the other in a row that can be cut: so many columns have so many
            entries of a run, rounded up at the end of the row. A cut lies where every run has whole
            entries.
    """

    width: int | None = None
    dtype: torch.dtype = torch.float32
    first: float = 0.0
    across: Literal["cut", "whole", "mean", "max"] = "mean"
    runs: tuple[tuple[int, int], ...] = ((1, 1),)

    @property
    def bytes_row(self) -> int:
        """How many bytes a row has of it."""
        return (1 if self.width is None else self.width) * self.dtype.itemsize

    def __post_init__(self) -> None:
        assert self.width is None or self.across in (
            "cut",
            "whole",
        ), "a mean or a maximum is of a single number"
        assert self.width is not None or self.across != "cut", (
            "a single number has no columns to cut"
        )

    def shape(self, rows: int) -> tuple[int, ...]:
        """Its shape in so many rows."""
        return (rows,) if self.width is None else (rows, self.width)

    def uncut(self, columns: tuple[int, int], dim: int) -> str:
        """Returns why no part of a row of D = dim columns can have these columns, for an error; ""
        if one can.

        columns: the first one and the one after the last.
        """
        block = dim if self.across == "whole" else math.lcm(*(count for count, _ in self.runs))
        if not any(at % block for at in columns if at < dim):
            return ""
        if self.across == "whole":
            return "is of a whole row"
        return f"has blocks of {block} columns, not whole in {columns[0]}:{columns[1]}"

    def part(self, entries: Tensor, columns: slice, dim: int) -> Tensor:
        """Returns what a part of rows with these columns has of it.

        Args:
            entries: of U rows, [U, ...]; all of them, or those of the part before.
            columns: within these rows; where they can be cut, see `uncut`.
            dim: D, how many columns these rows have.
        """
        if self.across != "cut":
            return entries
        parts = [entries[:, at] for at in self._entries(columns, dim)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def put(
        self, into: Tensor, at: slice | Tensor, entries: Tensor, columns: slice, dim: int
    ) -> None:
        """Write what a part has into rows of D = dim columns, at these rows and columns; see
        `part`.

        entries: those of the part, [U, ...], or [1, ...] where all rows get the same.
        """
        if self.across != "cut":
            into[at] = entries
            return
        places = self._entries(columns, dim)
        for place, part in zip(
            places, entries.split([p.stop - p.start for p in places], 1), strict=True
        ):
            into[at, place] = part

    def _entries(self, columns: slice, dim: int) -> list[slice]:
        """Returns which entries of a row of D = dim columns are of some columns, those of each
        run.
        """
        first, last, _ = columns.indices(dim)
        slices = []
        begin = 0
        for count, entries in self.runs:
            start = first * entries // count
            stop = -(-last * entries // count)
            slices.append(slice(begin + start, begin + stop))
            begin += -(-dim * entries // count)
        return slices


class RowFormat(Protocol):
    """What a member's `Config` offers."""

    @property
    def rounding(self) -> Rounding:
        """How values are rounded when they are written; "nearest" where nothing is lost."""
        ...

    def fields(self, dim: int) -> dict[str, Field]:
        """Returns the fields that hold the values of a row of D = dim columns, by name."""
        ...

    def encode(self, values_UD: Tensor, noise_UD: Tensor | None) -> dict[str, Tensor]:
        """Returns the fields of U rows.

        Args:
            values_UD: their values, float32 [U, D].
            noise_UD: for stochastic rounding a number of 32 bits for each value, int64 [U, D]; None
                rounds to nearest.
        """
        ...

    def decode(self, fields: Mapping[str, Tensor], dim: int) -> Tensor:
        """Returns the values of U rows as lookups read them, float32 [U, D], given their fields."""
        ...

    def exact(self, fields: Mapping[str, Tensor], dim: int) -> Tensor:
        """Returns the values of U rows as a rule begins with them, float32 [U, D], given their
        fields.
        """
        ...

    def cpp(self) -> str | None:
        """Returns the name of the codec in C++ and Triton, if there is one."""
        ...


def converted(weights_RD: Tensor, format: RowFormat) -> dict[str, Tensor]:
    """Returns the fields of rows, each rounded to nearest: trained rows for a service. The result
    is all it needs.

    A row that is not finite is what `encode` makes of it.

    Args:
        weights_RD: floats of any type, which may be mapped from a file.
        format: how the rows are stored then.
    """
    rows, dim = weights_RD.shape
    fields = {
        name: empty_rows(*field.shape(rows), dtype=field.dtype, device=str(weights_RD.device))
        for name, field in format.fields(dim).items()
    }
    block = max(1, BLOCK // dim)
    for row in range(0, rows, block):
        for name, part in format.encode(weights_RD[row : row + block].float(), None).items():
            fields[name][row : row + block] = part
    return fields


__all__ = ["BLOCK", "Field", "Rounding", "RowFormat", "converted"]
