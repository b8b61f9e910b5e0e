"""Whether a checkpoint is still what it was when it was loaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from sparrow.checkpoint.store import Checkpoint, load
from sparrow.core import UserError


def is_current(saved: Checkpoint) -> bool:
    """Returns whether a checkpoint is what it was when it was loaded: nobody removed it, or gave it
    all rows, since.
    """
    with suppress(UserError):  # it is gone
        return load(saved.path.parent, saved.step).files == saved.files
    return False


@contextmanager
def unchanged(saved: Checkpoint) -> Iterator[None]:
    """Who reads a checkpoint within this context is told if it does not stay what it is, see
    `is_current`.

    Raises:
        UserError: names it.
    """
    try:
        yield
    except (UserError, FileNotFoundError):
        if is_current(saved):
            raise
        raise UserError(
            f"{saved.path}: it got all its rows, or was removed, while it was read; begin again"
        ) from None
