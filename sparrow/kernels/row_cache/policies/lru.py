"""Least recently used."""

from __future__ import annotations

from dataclasses import dataclass

from sparrow.kernels.row_cache.policies import Policy


@dataclass(frozen=True, kw_only=True)
class Config(Policy):
    """The row that was used least recently gives way to every other one."""
