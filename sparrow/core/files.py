"""How files are written so that nothing is lost: a file gets its name only when all of it is on
disk.
"""

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
def replace_file(path: Path) -> Iterator[Path]:
    """Gives a hidden name beside `path` to write to.

    The file gets the name `path` when the block ends without an error. After an error it is
    removed.
    A file that was at `path` stays until it is replaced.

    Raises:
        UserError: when it cannot be written, such as on a full disk.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.touch()
        # what the user's umask asks for; some writers make files for their owner alone
        mode = partial.stat().st_mode
        yield partial
        partial.chmod(mode)
        with open(partial, "rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        raise cannot_write(path, error) from error
    finally:
        partial.unlink(missing_ok=True)


MANIFEST = "manifest.json"


def manifest_file(folder: Path, name: str, remedy: str) -> Path:
    """Returns the path of a file that the manifest of a folder names, or of the manifest. It need
    not be there.

    What is there is a regular file in the folder: to open a FIFO or a device may wait for ever, and
    what lies elsewhere is not the folder's. The folder itself may be a link, and so may a file that
    leads to another one in it.

    Args:
        folder: where the manifest is.
        name: as the manifest has it.
        remedy: the end of errors.

    Raises:
        UserError: for a name that leads out of the folder, and for what is no regular file.
    """
    path = folder / name
    try:
        reached = path.resolve()
        reason = "" if reached.is_file() or not reached.exists() else "no regular file"
        if not reached.is_relative_to(folder.resolve()):
            reason = f"leads to {reached}, out of the folder"
    except (OSError, ValueError, RuntimeError) as error:
        # a circle of links, a zero byte, a name that is too long
        reason = f"no file ({error})"
    if reason:
        raise UserError(f"{path}: {reason}; {remedy}")
    return path


def sync(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Write a text file, replacing what was at `path`; see `whole`."""
    with replace_file(path) as partial:
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
        f"{path}: cannot be written ({error.strerror or error}); make room or check its"
        " permissions: what was there before is unharmed"
    )


def _finite(data: Any) -> Any:
    if isinstance(data, Mapping):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data
