from __future__ import annotations

from typing import NamedTuple


class Size(NamedTuple):
    """A component of a table: R rows of D columns. name: "" for the only one."""

    name: str
    rows: int
    dim: int
