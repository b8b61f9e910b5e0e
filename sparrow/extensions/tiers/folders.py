"""Folders for files of rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from sparrow.core import UserError
from sparrow.core.files import sync
from sparrow.embeddings.spec import Placement


def make_folder(path: Path) -> Path:
    """Returns a folder for files of rows, made if it was not there.

    Raises:
        UserError: when it cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        sync(path.parent)  # a file that is on the disk needs its folder there
    except OSError as error:
        reason = f"cannot be made ({error.strerror or error})"
        raise UserError(f"{path}: {reason}; name another folder") from None
    return path


def with_folder(placement: Placement) -> Placement:
    """Returns a placement whose folder is there. `make_folder` says what is raised."""
    return (
        placement
        if placement.folder is None
        else replace(placement, folder=make_folder(placement.folder))
    )
