"""Which run directory has a folder of blocks: at most one, whatever was copied, moved or restored.

A note in the run directory says which directory it was written for, and names its folders. A folder
has the mark of the run that took it last. A run takes its folders each time it opens them, and the
mark changes. So a copy has the mark of before, at the latest once one of both goes on. A directory
has a folder if the note was written for it and the mark is that of its note. Else it reads the
blocks that its checkpoints need, and never writes or removes one.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from sparrow.core import UserError
from sparrow.core.files import write_text
from sparrow.extensions.tiers.stores.ssd import SUFFIX

NOTE = ".ssd.json"  # in a run's directory
MARK = "mark"  # in a folder of blocks


@dataclass(frozen=True, kw_only=True)
class Note:
    """What a run directory says of its folders of blocks.

    Args:
        name: what they are called.
        folders: where they are.
        inode: of the directory that the note was written for. A move keeps it, and a copy has
            another one.
        marks: the folders have one of them. There are two, because a kill may come between note and
            folders.
    """

    name: str
    folders: Sequence[str]
    inode: int
    marks: Sequence[str] = ()

    def write(self, run_dir: Path) -> None:
        """Write it into a directory."""
        write_text(run_dir / NOTE, json.dumps(asdict(self)))


def read_note(run_dir: Path) -> Note | None:
    """Returns a directory's note, whichever directory it was written for; None if there is none
    that can be read.
    """
    try:
        note = json.loads((run_dir / NOTE).read_text(encoding="utf-8"))
        marks = [str(mark) for mark in note.get("marks", [])]
        folders = [str(folder) for folder in note["folders"]]
        return Note(
            name=str(note["name"]), folders=folders, inode=int(note.get("inode", -1)), marks=marks
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def is_for(note: Note, run_dir: Path) -> bool:
    """Returns whether a note was written for a directory, which may have been moved since."""
    return note.inode == run_dir.stat().st_ino


def has(note: Note, folder: Path) -> bool:
    """Returns whether a folder has the mark of a note, or none, as one that is not there."""
    try:
        return (folder / MARK).read_text(encoding="utf-8") in note.marks
    except FileNotFoundError:
        return True
    except (OSError, ValueError):
        return False


def folders_of(run_dir: Path) -> list[Path]:
    """Returns the folders of blocks that a run directory has, but not those that it only reads."""
    note = read_note(run_dir)
    if note is None or not is_for(note, run_dir):
        return []
    return [folder for folder in map(Path, note.folders) if has(note, folder)]


def take(folder: Path, note: Note) -> None:
    """Give a folder the last mark of a note.

    Raises:
        UserError: when another run has taken it meanwhile, or it cannot be written.
    """
    try:
        with open(os.open(folder / MARK, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if (mark := file.read().decode(errors="replace")) and mark not in note.marks:
                raise UserError(
                    f"tiers.folder: {folder} was taken by a copy of this run directory; begin"
                    " again with --resume"
                )
            file.seek(0)
            file.write(note.marks[-1].encode())
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        remedy = "give its user the right to write there, or name another folder"
        raise UserError(
            f"tiers.folder: cannot write in {folder} ({error.strerror or error}); {remedy}"
        ) from None


def leave(folders: Iterable[Path]) -> None:
    """Remove folders in which there are no blocks."""
    for folder in folders:
        with suppress(OSError):
            if not any(folder.glob(f"*{SUFFIX}")):
                (folder / MARK).unlink(missing_ok=True)
                folder.rmdir()


def hand_over(run_dir: Path, new_dir: Path) -> None:
    """Give the folders of a run directory to another one, into which its files are moved now."""
    note = read_note(run_dir)
    if note is not None and is_for(note, run_dir):
        replace(note, inode=new_dir.stat().st_ino).write(run_dir)
