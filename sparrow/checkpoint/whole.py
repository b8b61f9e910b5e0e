"""A checkpoint of tables on an SSD gets all their rows, and needs no other file then."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sparrow.checkpoint import blocks
from sparrow.checkpoint.store import Checkpoint, clean, load, manifest_of, write_all
from sparrow.core import Chunk, UserError
from sparrow.core.files import cannot_write, sync, write_text
from sparrow.core.memory import gb
from sparrow.core.progress import Progress


def make_whole(saved: Checkpoint, told: Progress) -> int:
    """Write all rows of tables on an SSD into a checkpoint. Returns their bytes. It is the same checkpoint afterwards.

    Rows go from the blocks to files in pieces. The checkpoint is whole at every moment: its manifest names either the
    files of before or the new ones. Nobody else writes into its run meanwhile.

    Args:
        saved: the checkpoint. The files that it names are gone afterwards.
        told: is told how far it is.

    Raises:
        UserError: when rows cannot be read, or there is too little room.
    """
    parts = list(saved.on_ssd())
    size = sum(part.layout.record_bytes * part.layout.rows for part in parts)
    old = [name for file, entry in saved.files.items() if "blocks" in entry for name in (file, entry["newer"])]
    writing = saved.path.with_name(f".writing-{saved.step:09d}")
    clean(saved.path.parent)
    if (free := shutil.disk_usage(saved.path).free) < size:
        raise UserError(f"{saved.path}: all rows need {gb(size)}, and {gb(free)} are free; make room")

    def rows() -> Iterator[Chunk]:
        done, total = 0, sum(part.layout.rows for part in parts)
        for part in parts:
            for chunk in blocks.chunks(part, [part.rows]):
                yield chunk
                done += chunk.rows[1] - chunk.rows[0]
                told("rows", done, total)

    try:
        writing.mkdir()
        made = write_all(writing, {}, rows())
        for file in made:
            os.rename(writing / file, saved.path / file)
        sync(saved.path)
        files = {file: entry for file, entry in saved.files.items() if file not in old} | made
        state = {**saved.state, "fingerprint": saved.fingerprint}
        text = manifest_of(step=saved.step, identity=saved.identity, state=state, files=files)
        write_text(saved.path / "manifest.json", text)
        sync(saved.path)
    except OSError as error:
        raise cannot_write(saved.path, error) from error
    finally:
        shutil.rmtree(writing, ignore_errors=True)
    tidy(saved.path, files)
    return size


def tidy(path: Path, files: Collection[str]) -> None:
    """Remove what an end in the midst of it has left in a checkpoint's folder. files: those that it has."""
    for left in path.iterdir():
        if left.name not in files and left.name != "manifest.json":
            left.unlink()


def is_current(saved: Checkpoint) -> bool:
    """Returns whether a checkpoint is what it was when it was loaded: nobody removed it, or gave it all rows, since."""
    with suppress(UserError):  # it is gone
        return load(saved.path.parent, saved.step).files == saved.files
    return False


@contextmanager
def unchanged(saved: Checkpoint) -> Iterator[None]:
    """Who reads a checkpoint within this context is told if it does not stay what it is, see `is_current`.

    Raises:
        UserError: names it.
    """
    try:
        yield
    except (UserError, FileNotFoundError):
        if is_current(saved):
            raise
        raise UserError(f"{saved.path}: it got all its rows, or was removed, while it was read; begin again") from None
