from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Sequence


class UserError(ValueError):
    """A mistake that the user can correct: one line that names the place, the value and the remedy.

    The command line prints it without a traceback and exits with 2.
    """


def suggest(name: str, known: Iterable[str]) -> str:
    """Returns the end of an error about an unknown `name`: `"; did you mean 'x'?"`, or the list of `known` names."""
    known = sorted(known)
    close = difflib.get_close_matches(name[:100], known, n=1)  # it takes long for what is long
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(known) or 'none'}"


def listed(texts: Sequence[str], most: int = 4) -> str:
    """Returns the first `most` texts, and how many more there are: "a, b, c, d and 3 more"."""
    return ", ".join(texts[:most]) + (f" and {len(texts) - most} more" if len(texts) > most else "")


def require(
    *, above: float | None = None, least: float = -math.inf, most: float = math.inf, **values: float | None
) -> None:
    """Check named values; a value of None passes.

    Args:
        above: what each value must be greater than.
        least: the smallest legal value.
        most: the largest legal value.
        **values: name -> value.

    Raises:
        UserError: for a value that is not finite or not in range.
    """
    for name, x in values.items():
        if x is not None and not (math.isfinite(x) and least <= x <= most and (above is None or x > above)):
            low = f"above {above:g}" if above is not None else f"of {least:g} or more"
            high = f", at most {most:g}" if math.isfinite(most) else ""
            raise UserError(f"{name}: {x} is out of range; give a number {low}{high}")
