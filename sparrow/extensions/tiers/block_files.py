"""Where a run has the rows of its tables on an SSD, and which of its checkpoints need them."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import Any

from typing_extensions import override

from sparrow import checkpoint
from sparrow.core import UserError
from sparrow.distributed import World, everywhere, run_on_rank0
from sparrow.embeddings import EmbeddingTables
from sparrow.extensions.tiers.claims import (
    Note,
    folders_of,
    hand_over,
    has,
    is_for,
    leave,
    read_note,
    take,
)
from sparrow.extensions.tiers.folders import make_folder
from sparrow.extensions.tiers.settings import Config
from sparrow.extensions.tiers.stores.cached import ssd_of
from sparrow.extensions.tiers.stores.ssd import SUFFIX
from sparrow.kernels.block_io import remove
from sparrow.trained.run import Run
from sparrow.training.callbacks import Callback
from sparrow.training.rundir import RunDir

__all__ = ["BlockFiles", "forget", "hand_over", "remove_files"]


def forget(run_dir: Path) -> None:
    """Remove the files of a run whose directory is about to be removed."""
    remove_files(folders_of(run_dir))


def remove_files(folders: Collection[Path]) -> None:
    """Remove the files of blocks in these folders, but those that a process writes, and then the
    folders.
    """
    for folder in folders:
        for path in folder.glob(f"*{SUFFIX}"):
            remove(path)
    leave(folders)


class BlockFiles(Callback):
    """The files of blocks of a run. They lie in a folder of `tiers.folder` that is the run's alone.

    A file is removed when no checkpoint needs it and no process has it open.

    Args:
        world: the ranks. Each may have another `tiers.folder`.
        run: its settings.
        dir: the run's directory, where a note says which folders it has.
        tables: the model's.
        say: is told when the run has to write elsewhere.

    folders: where this rank has files, from `open` on.
    """

    def __init__(
        self,
        world: World,
        run: Run,
        dir: RunDir,
        tables: Sequence[EmbeddingTables],
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._world = world
        self._dir = dir
        self._say = say
        components = chain.from_iterable(features.components for features in tables)
        has_blocks = any(component.tier.has_blocks for component in components)
        settings = run.settings_of(Config)
        is_named = has_blocks and not settings.full_checkpoints
        self._ssd = settings.folder if is_named else None  # else files go away with the process
        records = chain.from_iterable(features.all_records() for features in tables)
        stores = [ssd_of(record.store) for record in records]
        self._stores = [store for store in stores if store is not None]
        self._is_on = False
        self.folders: list[Path] = []

    @override
    @contextmanager
    def open(self) -> Iterator[None]:
        """Have files with names until training ends. Those that killed ones have left of this run
        are removed first.

        A run that ends without a checkpoint leaves no file and no folder.
        """
        own_folders = self._take()
        if self._is_on:
            self._clean()
            self._world.barrier("ssd")
        for store in self._stores if own_folders else ():
            store.name_file(own_folders[0])
        try:
            yield
        finally:
            for store in self._stores:
                store.close()
            # but not one that has files which checkpoints need, or another rank's
            leave(self.folders)

    @override
    def after_save(self, step: int) -> None:
        """Keep the blocks of the checkpoint that was written last, and free those of checkpoints
        that are gone.
        """
        if self._is_on:
            # in the background: else a file of another rank may have no lock yet
            self._world.barrier("ssd")
            steps = run_on_rank0(
                self._world, "checkpoints", lambda: checkpoint.steps(self._dir.checkpoints)
            )
            for store in self._stores:
                store.keep_only(steps, step)
            self._clean()

    def _take(self) -> list[Path]:
        """Take the run's folders. Returns the one that this rank will write to, if it will."""
        note = Note(**run_on_rank0(self._world, "ssd", self._known))
        own_folders = self._own_folders(note)
        if not all(self._world.gathered("ssd", all(has(note, folder) for folder in own_folders))):
            note = Note(**run_on_rank0(self._world, "ssd", self._new))
            own_folders = self._own_folders(note)
        self.folders = [folder for folder in map(Path, note.folders) if has(note, folder)]
        self.folders = list(dict.fromkeys([*self.folders, *own_folders]))
        self._is_on = run_on_rank0(self._world, "ssd", lambda: bool(self.folders))
        if not self._is_on:
            return own_folders
        note = replace(note, folders=[str(folder) for folder in self.folders])
        if self._world.rank == 0:
            note.write(self._dir.path)
        everywhere(self._world, "ssd", lambda: self._mark(note, own_folders))
        if self._world.rank == 0:
            replace(note, marks=note.marks[-1:]).write(self._dir.path)
        return own_folders

    def _known(self) -> dict[str, Any]:
        """Returns the directory's note, with one more mark; a new one if there is none, or if it is
        another's.
        """
        note = read_note(self._dir.path)
        if note is None or not is_for(note, self._dir.path):
            return self._new()
        return asdict(replace(note, marks=[*note.marks, secrets.token_hex(16)]))

    def _new(self) -> dict[str, Any]:
        """Returns a note with a name that no folder has. Tells those who may think that the run has
        one.
        """
        path = self._dir.path.resolve()
        if (old := read_note(path)) is not None and old.folders:
            text = (
                f"{path} is a copy, or was restored: rows of its checkpoints stay in"
                f" {', '.join(old.folders)}"
            )
            self._say(f"{text}, and it writes to another folder; remove what no run needs any more")
        name = f"{path.name}-{secrets.token_hex(8)}"
        return asdict(
            Note(name=name, folders=[], inode=path.stat().st_ino, marks=[secrets.token_hex(16)])
        )

    def _own_folders(self, note: Note) -> list[Path]:
        return [] if self._ssd is None else [Path(self._ssd).resolve() / note.name]

    def _mark(self, note: Note, own_folders: Sequence[Path]) -> None:
        for folder in own_folders if self._stores else ():
            make_folder(folder)
        for folder in self.folders:
            if folder.is_dir():
                take(folder, note)

    def _clean(self) -> None:
        """Remove files that no checkpoint needs."""
        needed = run_on_rank0(self._world, "files of checkpoints", self._needed)
        if needed is None:
            return
        for folder in self.folders:
            for path in folder.glob(f"*{SUFFIX}"):
                if str(path) not in needed:
                    remove(path)

    def _needed(self) -> list[str] | None:
        """Returns the files that checkpoints need; None if one cannot be read, and nobody knows."""
        files: list[str] = []
        for step in checkpoint.steps(self._dir.checkpoints):
            try:
                files += checkpoint.load(self._dir.checkpoints, step).block_files
            except UserError:
                return None
        return files
