"""How files are written so that nothing is lost: a file gets its name only when all of it is on disk."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sparrow.core.errors import UserError


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Gives a hidden name beside `path` to write to.

    The file gets the name `path` when the block ends without an error. After an error it is removed.
    A file that was at `path` stays until it is replaced.

    Raises:
        UserError: when it cannot be written, such as on a full disk.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.touch()
        mode = partial.stat().st_mode  # what the user's umask asks for; some writers make files for their owner alone
        yield partial
        partial.chmod(mode)
        with open(partial, "rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        raise cannot_write(path, error) from error
    finally:
        partial.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Write a text file, replacing what was at `path`; see `whole`."""
    with whole(path) as partial:
        partial.write_text(text, encoding="utf-8")


def to_json(data: Any, **options: Any) -> str:
    """Returns JSON text, with null for NaN and infinities, which JSON does not know."""
    return json.dumps(_finite(data), allow_nan=False, **options)


PATIENCE_S = 60.0  # so long a shared file system may take to show what another host wrote


def comes_into_view(path: Path, seconds: float, text: str | None = None) -> bool:
    """Returns whether a file came into view within some seconds; waits for it.

    What another host wrote may be late, because NFS remembers for a while what it did not find.

    Args:
        path: the file.
        seconds: how long to wait at most.
        text: what the file must hold, if it matters.
    """
    deadline = time.monotonic() + seconds
    while not path.exists() or (text is not None and path.read_text(encoding="utf-8") != text):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
        with suppress(OSError):
            os.listdir(path.parent)  # this makes NFS ask its server again
    return True


def refuse_existing(path: Path, overwrite: bool) -> None:
    """Raise UserError when something is at `path` and may not be replaced."""
    if path.exists() and not overwrite:
        raise UserError(f"{path}: exists; choose another name, or overwrite it (--overwrite)")


def cannot_write(path: Path, error: OSError) -> UserError:
    """Returns the error to raise when writing `path` failed."""
    return UserError(
        f"{path}: cannot be written ({error.strerror or error}); make room or check its permissions: what was there "
        "before is unharmed"
    )


def _finite(data: Any) -> Any:
    if isinstance(data, Mapping):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data
