"""How a row is stored. One file per format: its `Config` is the format, and `encode` and `decode` its definition.

To add a format, add its file here. A format that the C++ kernels do not know runs on the reference kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Field:
    """One field of a row record: some entries for each row.

    Args:
        width: how many entries a row has; None for a single number.
        dtype: the type of the entries.
        first: their value in a row that was never updated.
        across: what the parts have of it when a layout cuts the table by columns. "cut": there is an entry per column,
            and each part has those of its columns. "whole": the entries are of a whole row, so the table cannot be cut
            by columns. "mean" and "max": each part has a number of its own. The number of the row is their mean,
            weighted by columns, or the largest.
    """

    width: int | None = None
    dtype: torch.dtype = torch.float32
    first: float = 0.0
    across: Literal["cut", "whole", "mean", "max"] = "mean"

    @property
    def bytes_row(self) -> int:
        """How many bytes a row has of it."""
        return (1 if self.width is None else self.width) * self.dtype.itemsize

    def __post_init__(self) -> None:
        assert self.width is None or self.across in ("cut", "whole"), "a mean or a maximum is of a single number"
        assert self.width is not None or self.across != "cut", "a single number has no columns to cut"

    def shape(self, rows: int) -> tuple[int, ...]:
        """Its shape in so many rows."""
        return (rows,) if self.width is None else (rows, self.width)


class RowFormat(Protocol):
    """What a member's `Config` offers."""

    @property
    def is_compiled(self) -> bool:
        """Whether the C++ kernels read and write such rows."""
        ...

    def fields(self, dim: int) -> dict[str, Field]:
        """Returns the fields that hold the values of a row of D = dim columns, by name."""
        ...

    def encode(self, values_UD: Tensor) -> dict[str, Tensor]:
        """Returns the fields of U rows, given their values, float32 [U, D]."""
        ...

    def decode(self, fields: Mapping[str, Tensor]) -> Tensor:
        """Returns the values of U rows, float32 [U, D], given their fields."""
        ...


__all__ = ["Field", "RowFormat"]
