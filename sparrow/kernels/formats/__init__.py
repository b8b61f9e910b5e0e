"""How a row is stored. One file per format: its `Config` is the format, and `encode` and `decode` its definition.

Adding a format is adding its file here; a format that C++ does not know runs on the reference kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Field:
    """One field of a row record: the entries that each row has of it.

    width: how many entries, None for a single number. dtype: theirs. first: their value in a row that was never
    updated. across: what column parts of a table (column-wise layouts) have of it. "cut": an entry per column, each
    part those of its columns; "whole": entries of a whole row, so that the table cannot be cut by columns; "mean" and
    "max": each part has a number of its own, and the row's is their mean, weighted by columns, or the largest.
    """

    width: int | None = None
    dtype: torch.dtype = torch.float32
    first: float = 0.0
    across: Literal["cut", "whole", "mean", "max"] = "mean"

    @property
    def bytes_row(self) -> int:
        """Bytes that a row has of it."""
        return (1 if self.width is None else self.width) * self.dtype.itemsize

    def empty(self, rows: int) -> tuple[int, ...]:
        """Its shape in so many rows."""
        return (rows,) if self.width is None else (rows, self.width)


class RowFormat(Protocol):
    """What a member's `Config` offers."""

    @property
    def is_compiled(self) -> bool:
        """Whether the C++ kernels read and write such rows."""
        ...

    def fields(self, dim: int) -> dict[str, Field]:
        """The fields that hold the values of a row of D = dim columns, by name."""
        ...

    def encode(self, values_UD: Tensor) -> dict[str, Tensor]:
        """Float32 values [U, D] -> the fields of U rows."""
        ...

    def decode(self, fields: Mapping[str, Tensor]) -> Tensor:
        """The fields of U rows -> their values float32 [U, D]."""
        ...


__all__ = ["Field", "RowFormat"]
