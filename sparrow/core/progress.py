from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Long work calls it with (what, done, total); total is 0 while it is unknown. The command line
draws a bar.
"""
