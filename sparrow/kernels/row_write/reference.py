"""The definition."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def write(fields: Sequence[Tensor], values: Sequence[Tensor], rows_L: Tensor) -> None:
    """See the package."""
    for field, value in zip(fields, values, strict=True):
        field[rows_L] = value
