"""Checkpoints of a run with tables on an SSD get all rows after it has ended."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

from sparrow import checkpoint
from sparrow.checkpoint import Checkpoint
from sparrow.checkpoint.store import manifest_of, write_all
from sparrow.core import Chunk, UserError
from sparrow.core.files import cannot_write, sync, write_text
from sparrow.core.memory import gb
from sparrow.core.progress import Progress
from sparrow.distributed import World
from sparrow.extensions.tiers.block_files import BlockFiles
from sparrow.extensions.tiers.stores.saved import Saved
from sparrow.trained.run import Run
from sparrow.training.rundir import RunDir


def make_whole(run_dir: Path, name: str, progress: Progress) -> list[str]:
    """Write all rows of tables on an SSD into a checkpoint of a run. Returns what there is to say
    about it.

    Files of blocks that no checkpoint needs any more are removed.

    Args:
        run_dir: the run directory.
        name: the checkpoint, see `restore`.
        progress: is told how far it is.

    Raises:
        UserError: when there is no such run or checkpoint, when the run trains, and as `copy_rows`
            says.
    """
    run = Run.load(run_dir / "run.toml")
    dir = RunDir(run_dir)
    with dir.locked():
        saved = checkpoint.load(dir.checkpoints, checkpoint.named(dir.checkpoints, name))
        if saved.block_files:
            messages = [
                f"{saved.path}: it has all rows now, {gb(copy_rows(saved, progress))}, and needs no"
                " other file"
            ]
        else:
            messages = [f"{saved.path}: it had all rows already"]
            tidy(saved.path, saved.files)
        dir.remove_leftovers()
        with BlockFiles(World(), run, dir, []).open():
            pass  # this removes files
        left = []
        for step in checkpoint.steps(dir.checkpoints):
            with suppress(UserError):  # a damaged one
                left += [step] if checkpoint.load(dir.checkpoints, step).block_files else []
    if left:
        messages.append(
            f"without all rows: step {', '.join(map(str, left))}; --whole {left[-1]} gives them to"
            " one more"
        )
    return messages


def copy_rows(saved: Checkpoint, progress: Progress) -> int:
    """Write all rows of tables on an SSD into a checkpoint. Returns their bytes. It is the same
    checkpoint afterwards.

    Rows go from the blocks to files in pieces. The checkpoint is whole at every moment: its
    manifest names either the files of before or the new ones. Nobody else writes into its run
    meanwhile.

    Args:
        saved: the checkpoint. The files that it names are gone afterwards.
        progress: is told how far it is.

    Raises:
        UserError: when rows cannot be read, or there is too little room.
    """
    parts = [part for part in saved.external() if isinstance(part, Saved)]
    size = sum(part.layout.record_bytes * part.layout.rows for part in parts)
    old: set[str] = set()
    for file, entry in saved.files.items():
        if "blocks" in entry:
            old |= {file, entry["newer"]}
    writing = saved.path.with_name(f".writing-{saved.step:09d}")
    checkpoint.clean(saved.path.parent)
    if (free := shutil.disk_usage(saved.path).free) < size:
        raise UserError(
            f"{saved.path}: all rows need {gb(size)}, and {gb(free)} are free; make room"
        )

    def rows() -> Iterator[Chunk]:
        copied = 0
        total = sum(part.layout.rows for part in parts)
        for part in parts:
            for chunk in part.chunks([part.rows]):
                yield chunk
                copied += chunk.rows[1] - chunk.rows[0]
                progress("rows", copied, total)

    try:
        writing.mkdir()
        new = write_all(writing, {}, rows())
        for file in new:
            os.rename(writing / file, saved.path / file)
        sync(saved.path)
        files = {file: entry for file, entry in saved.files.items() if file not in old} | new
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
    """Remove what an end in the midst of it has left in a checkpoint's folder. files: those that it
    has.
    """
    for left in path.iterdir():
        if left.name not in files and left.name != "manifest.json":
            left.unlink()
