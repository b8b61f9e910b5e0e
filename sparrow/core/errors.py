from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable

Progress = Callable[[str, int, int], None]
"""Told (what, done, total) by long work; the command line draws it as a bar."""


class UserError(ValueError):
    """A mistake that the user can mend: one line that names the place, the value and the remedy.

    The command line prints it without a traceback and exits with 2.
    """


def suggest(name: str, known: Iterable[str]) -> str:
    """`"; did you mean 'x'?"` or the list of `known` names, to end an error about an unknown `name`."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(known) or 'none'}"
