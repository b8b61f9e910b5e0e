"""Least frequently used of late."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sparrow.kernels.row_cache.policies import Policy


@dataclass(frozen=True, kw_only=True)
class Config(Policy):
    """As LFU, but uses are forgotten sooner, for logs whose popular rows change, such as articles
    of a day.
    """

    most: ClassVar[int] = 15  # more take longer to forget
    halved: ClassVar[int] = 32
    by_count: ClassVar[bool] = True
    is_strict: ClassVar[bool] = True
