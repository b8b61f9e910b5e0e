from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Told (what, done, total) by long work, total 0 while unknown; the command line draws it as a bar."""
