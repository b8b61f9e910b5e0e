"""Where a run has the rows of its tables on an SSD, and which of its checkpoints need them."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path

from sparrow import checkpoint
from sparrow.core import Chunk, UserError
from sparrow.core.files import write_text
from sparrow.core.workplace import clean
from sparrow.distributed import World, said
from sparrow.embeddings import EmbeddingTables
from sparrow.embeddings.stores import Saved, ssd_of
from sparrow.embeddings.stores.ssd import SUFFIX
from sparrow.kernels.block_io import remove
from sparrow.trained.run import Run
from sparrow.training.disk import NOTE, folders_of
from sparrow.training.rundir import RunDir


def forget(run_dir: Path) -> None:
    """Remove the files of a run whose directory is about to be removed."""
    remove_files(folders_of(run_dir))


def remove_files(folders: Iterable[Path]) -> None:
    """Remove the files of blocks in these folders, but those that a process writes, and then the folders."""
    for folder in folders:
        for path in folder.glob(f"*{SUFFIX}"):
            remove(path)
        with suppress(OSError):
            folder.rmdir()


class BlockFiles:
    """The files of blocks of a run. They lie in a folder of `run.ssd` that is the run's alone.

    A file is removed when no checkpoint needs it and no process has it open.

    Args:
        world: the ranks. Each may have another `run.ssd`.
        run: its settings.
        dir: the run's directory, where a note says which folders it has.
        tables: the model's.

    folders: where this rank has files, from `opened` on.
    """

    def __init__(self, world: World, run: Run, dir: RunDir, tables: Sequence[EmbeddingTables]) -> None:
        self._world, self._dir, self._tables = world, dir, tables
        components = [c for of_features in tables for spec in of_features.specs for c in spec.components]
        is_named = any(component.tier.has_blocks for component in components) and not run.checkpoint.whole
        self._ssd = run.ssd if is_named else None  # else files go away with the process
        stores = [record.store for of_features in tables for record in of_features.all_records()]
        self._stores = [found for store in stores if (found := ssd_of(store))]
        self._is_on = False
        self.folders: list[Path] = []

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Have files with names until training ends. What killed ones have left of this run is removed first.

        That is files, and the hidden folders of a search or of `--precision auto`.

        A run that ends without a checkpoint leaves no file and no folder.
        """
        name, folders = said(self._world, "ssd", self._known)
        mine = [] if self._ssd is None else [Path(self._ssd).resolve() / name]
        if self._world.rank == 0:
            with suppress(OSError):  # it is in nobody's way
                clean(self._dir.path, forget)
        self._is_on = bool(folders)
        self.folders = list(dict.fromkeys([*map(Path, folders), *mine]))
        if self._is_on:
            self._clean()
            self._world.barrier("ssd")
        for store in self._stores if mine else ():
            store.name_file(mine[0])
        try:
            yield
        finally:
            for store in self._stores:
                store.close()
            for folder in self.folders:
                with suppress(OSError):  # it has files that checkpoints need, or another rank's
                    folder.rmdir()

    def saved(self) -> Iterator[Chunk | Saved]:
        """Returns what this rank has to save of the tables."""
        return chain.from_iterable(tables.saved() for tables in self._tables)

    def keep(self, step: int) -> None:
        """Keep the blocks of the checkpoint that was written last, and free those of checkpoints that are gone."""
        if self._is_on:
            self._world.barrier("ssd")  # in the background: else a file of another rank may have no lock yet
            steps = said(self._world, "checkpoints", lambda: checkpoint.steps(self._dir.checkpoints))
            for store in self._stores:
                store.keep_only(steps, step)
            self._clean()

    def _known(self) -> tuple[str, list[str]]:
        """Returns the name of the run's folders, and those that it has on this host.

        A copy of a run directory gets another name, at the same path too, as within a container. One that was moved
        keeps its own.
        """
        note, here = self._dir.path / NOTE, str(self._dir.path.resolve())
        number = self._dir.path.stat().st_ino
        name, folders = f"{self._dir.path.resolve().name}-{secrets.token_hex(8)}", []
        try:
            found = json.loads(note.read_text(encoding="utf-8"))
            is_same = found.get("inode", number) == number
            if is_same if found["run_dir"] == here else not (Path(found["run_dir"]) / NOTE).exists():
                name, folders = str(found["name"]), [str(folder) for folder in found["folders"]]
        except (OSError, ValueError, KeyError, TypeError):
            pass  # there is none, or it cannot be read
        mine = [] if self._ssd is None else [str(Path(self._ssd).resolve() / name)]
        folders = list(dict.fromkeys(folders + mine))
        if folders:
            write_text(note, json.dumps({"run_dir": here, "inode": number, "name": name, "folders": folders}))
        return name, folders

    def _clean(self) -> None:
        """Remove files that no checkpoint needs."""
        needed = said(self._world, "files of checkpoints", self._needed)
        if needed is None:
            return
        for folder in self.folders:
            for path in folder.glob(f"*{SUFFIX}"):
                if str(path) not in needed:
                    remove(path)

    def _needed(self) -> list[str] | None:
        """Returns the files that checkpoints need; None if one cannot be read, and nobody knows."""
        found: list[str] = []
        for step in checkpoint.steps(self._dir.checkpoints):
            try:
                found += checkpoint.load(self._dir.checkpoints, step).block_files
            except UserError:
                return None
        return found
