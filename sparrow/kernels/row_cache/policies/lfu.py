"""Least frequently used (arXiv 2010.11305, section 3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sparrow.kernels.row_cache.policies import Policy


@dataclass(frozen=True, kw_only=True)
class Config(Policy):
    """The row that was used least often gives way to one that was used more often."""

    most: ClassVar[int] = 255
    by_count: ClassVar[bool] = True
    is_strict: ClassVar[bool] = True
