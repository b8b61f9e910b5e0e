"""The hidden folder in which a folder is made before it gets its name."""

from __future__ import annotations

import fcntl
import glob
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sparrow.core.files import cannot_write

_LOCK, _NEW = "sparrow-prepare.lock", "sparrow-prepare.new"  # the latter: until it is locked


@contextmanager
def workplace(
    out: Path, leave: Callable[[Path], None] = lambda folder: None
) -> Iterator[tuple[Path, list[str]]]:
    """Yields a hidden folder beside `out` that goes away with the block, and notes on what killed
    programs had left.

    Their folders are known by a lock that nobody holds any more, and are deleted. A folder that one
    had moved away from `out`, to put a new one in its place, is put back.

    Args:
        out: the folder.
        leave: is given each folder in a hidden one before it is deleted, to remove what it has
            elsewhere.

    Raises:
        UserError: when no folder can be made.
    """
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        notes = clean(out, leave)
        work = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    except OSError as error:
        raise cannot_write(out, error) from error
    try:
        with open(work / _NEW, "w", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            (work / _NEW).rename(work / _LOCK)  # others never see it without its lock
            yield work, notes
    finally:
        _remove(work, leave)


def _remove(work: Path, leave: Callable[[Path], None]) -> None:
    """The lock last: what a kill leaves in the midst of it is still known by it."""
    for path in work.iterdir():
        if path.is_dir():
            leave(path)
            shutil.rmtree(path, ignore_errors=True)
        elif path.name != _LOCK:
            path.unlink(missing_ok=True)
    shutil.rmtree(work, ignore_errors=True)


def clean(out: Path, leave: Callable[[Path], None]) -> list[str]:
    """Remove the hidden folders beside `out` that killed programs have left. Returns notes. leave:
    see `workplace`.
    """
    notes = []
    for lock in out.parent.glob(f".{glob.escape(out.name)}.*/{_LOCK}"):
        work = lock.parent
        with open(lock, encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                continue  # somebody else is making it
            if (work / "old").exists() and not out.exists():
                (work / "old").rename(out)
                notes.append(f"{out}: put back where it was before its replacement was killed")
            _remove(work, leave)
            notes.append(f"{work}: left by a program that was killed; deleted")
    # killed before it could make a lock
    for work in out.parent.glob(f".{glob.escape(out.name)}.{'?' * 8}"):
        with suppress(FileNotFoundError, NotADirectoryError):  # somebody else's may go meanwhile
            if time.time() - work.stat().st_mtime > 60 and all(
                path.name == _NEW for path in work.iterdir()
            ):
                shutil.rmtree(work, ignore_errors=True)
    return notes
