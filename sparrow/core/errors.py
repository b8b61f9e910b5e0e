from __future__ import annotations

import difflib
import errno
import math
from collections.abc import Iterable, Sequence


class UserError(ValueError):
    """A mistake that the user can correct: one line that names the place, the value and the remedy.

    The command line prints it without a traceback and exits with 2.

    Example:
        >>> from sparrow import TableSpec, UserError
        >>> from sparrow.embeddings.addressing import direct
        >>> try:
        ...     TableSpec(name="item", dim=0, addressing=direct.Direct(10))
        ... except UserError as error:
        ...     print(error)
        dim: 0 is out of range; give a number of 1 or more
    """


class LostRankError(UserError):
    """A rank of the job does not answer any more, or ended before.

    cause: what the error is about, without what differs between the ranks that wait.
    """

    def __init__(self, text: str, cause: str) -> None:
        super().__init__(text)
        self.cause = cause


def first_line(error: Exception) -> str:
    """Returns what an error says, in one line; its kind where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def is_lack_of_memory(error: BaseException) -> bool:
    """Returns whether an error says that there is no more memory, of which each thread needs some,
    too.
    """
    if isinstance(error, MemoryError) or (
        isinstance(error, OSError) and error.errno == errno.ENOMEM
    ):
        return True
    says = (
        "can't start new thread",
        "can't allocate memory",
        "Cannot allocate memory",
        "bad_alloc",
    )
    return isinstance(error, (OSError, RuntimeError)) and any(text in str(error) for text in says)


def complaint(error: Exception) -> str:
    """Returns the first line of what a library says of a file or a value.

    Raises:
        Exception: the error itself where memory lacks, which says nothing of the file.
    """
    if is_lack_of_memory(error):
        raise error
    return first_line(error)


def suggest(name: str, known: Iterable[str]) -> str:
    """Returns the end of an error about an unknown `name`: `"; did you mean 'x'?"`, or the list of
    `known` names.
    """
    known = sorted(known)
    close = difflib.get_close_matches(name[:100], known, n=1)  # it takes long for what is long
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(known) or 'none'}"


def counted(count: int, noun: str) -> str:
    """Returns a number with its noun: "1 rank", "2,000 ranks". noun: in the singular, of the
    regular kind.
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def listed(texts: Sequence[str], most: int = 4) -> str:
    """Returns the first `most` texts, and how many more there are: "a, b, c, d and 3 more"."""
    return ", ".join(texts[:most]) + (f" and {len(texts) - most} more" if len(texts) > most else "")


def require(
    *,
    above: float | None = None,
    least: float = -math.inf,
    most: float = math.inf,
    **values: float | None,
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
        if x is not None and not (
            math.isfinite(x) and least <= x <= most and (above is None or x > above)
        ):
            low = f"above {above:g}" if above is not None else f"of {least:g} or more"
            high = f", at most {most:g}" if math.isfinite(most) else ""
            raise UserError(f"{name}: {x} is out of range; give a number {low}{high}")
