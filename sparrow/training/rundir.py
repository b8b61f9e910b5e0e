"""A run's directory: who may write there, what a run begins with and from which checkpoint it
continues.
"""

from __future__ import annotations

import dataclasses
import fcntl
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sparrow import checkpoint
from sparrow.core import UserError
from sparrow.core.config import to_dict
from sparrow.core.extensions import files_of_all, modules_elsewhere
from sparrow.core.files import PATIENCE_S, cannot_write, comes_into_view, replace_file
from sparrow.core.workplace import clean
from sparrow.data.batches.dataset import Dataset
from sparrow.distributed import World, everywhere, run_on_rank0
from sparrow.features.schema import Schema
from sparrow.layers.precision import AUTO_FILE, Precision, is_recipe_of
from sparrow.trained.build import check_schema
from sparrow.trained.calibrators import FOLDER as CALIBRATORS
from sparrow.trained.run import Run

MADE = (
    *("log.jsonl", "results.json", "curves.png", "profile.json", "trace.json.gz", "report.html"),
    *("numerics.html", "numerics.json", "recipe.toml"),
)
LOCK = ".lock"


class RunDir:
    """Where everything about a run is written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"

    def find(
        self,
        world: World,
        resume: bool,
        overwrite: bool,
        identity: Mapping[str, Any],
        dataset: Dataset,
    ) -> tuple[checkpoint.Checkpoint | None, dict[str, Any]]:
        """Returns the checkpoint to go on from and the settings of its run, by dotted name.

        Rank 0 looks and all do as it says, because ranks may see a shared folder differently.

        Raises:
            UserError: for a run that is in the way, for another one's checkpoint, and when a rank
                does not come to see it.
        """

        def look() -> dict[str, Any] | None:
            saved = self._look(resume, overwrite)
            if saved is None:
                return None
            self.check(saved, identity, dataset)
            return {"step": saved.step, "settings": to_dict(Run.load(self.path / "run.toml"))}

        earlier = run_on_rank0(world, "where to go on", look)
        return (
            (None, {})
            if earlier is None
            else (self.see_checkpoint(earlier["step"], world), earlier["settings"])
        )

    def _look(self, resume: bool, overwrite: bool) -> checkpoint.Checkpoint | None:
        """The checkpoint to go on from; UserError rather than mix two runs in one directory."""
        step = checkpoint.latest(self.checkpoints)
        if step is None or overwrite:
            return None
        if not resume:
            raise UserError(
                f"{self.path}: holds a run up to step {step}; add --resume, --overwrite or another"
                " --run_dir"
            )
        return checkpoint.load(self.checkpoints, step)

    def see_checkpoint(self, step: int, world: World) -> checkpoint.Checkpoint:
        """Returns the checkpoint that rank 0 named.

        Raises:
            UserError: when a rank does not come to see it.
        """
        folder = self.checkpoints / f"step-{step:09d}"

        def look() -> checkpoint.Checkpoint:
            if world.rank:
                self.await_file(folder / "manifest.json", world)
            saved = checkpoint.load(self.checkpoints, step)
            for file in saved.files if world.rank else ():
                self.await_file(folder / file, world)
            return saved

        return everywhere(world, "where to go on", look)

    def check_shared(self, token: str, world: World) -> None:
        """Check that all ranks share the directory. token: what the lock holds that rank 0 has
        made.

        Raises:
            UserError: when a rank does not come to see this lock.
        """
        everywhere(world, "run_dir", lambda: self.await_file(self.path / LOCK, world, token))

    def check_writable(self, world: World) -> None:
        """Check that every rank can write where all will write checkpoints, with a file that goes
        away again.

        Raises:
            UserError: on every rank, when one cannot. It names that rank.
        """

        def write() -> None:
            for folder in (self.path, self.checkpoints):
                file = folder / f".written-by-rank-{world.rank}"
                try:
                    if folder.exists():
                        _write_and_remove(file)
                except OSError as error:
                    remedy = "give its user the right to, make room, or choose another --run_dir"
                    raise UserError(
                        f"{folder}: cannot be written ({error.strerror or error}); {remedy}"
                    ) from None

        everywhere(world, "run_dir", write, name_rank=True)

    def await_file(self, path: Path, world: World, text: str | None = None) -> None:
        """Wait for a file that rank 0 sees. text: what it holds, if it is to hold something.

        Raises:
            UserError: when this rank does not come to see it.
        """
        patience_s = min(PATIENCE_S, world.timeout.total_seconds() / 2)  # the others wait meanwhile
        if not comes_into_view(path, patience_s, text):
            raise UserError(
                f"{path}: rank 0 sees it, and rank {world.rank} has not for {patience_s:g} s; use a"
                " folder that all ranks share"
            )

    def check(
        self, saved: checkpoint.Checkpoint, identity: Mapping[str, Any], dataset: Dataset
    ) -> None:
        """Check that a checkpoint is of this model and this log.

        Raises:
            UserError: when it is of others.
        """
        check_schema(Schema.load(self.path / "schema.toml"), dataset.schema, dataset.path)
        convert = f"begin another run_dir with --init_from {self.path}, which converts table rows"
        # the last four are of the cache
        converted = ("format", "state", "fraction", "bytes", "policy", "protect")
        saved.check(identity, dict.fromkeys(converted, convert))
        if saved.state.get("data") != dataset.fingerprint:
            raise UserError(
                f"{dataset.path}: the prepared log is not the one that this run began with; prepare"
                " it as it was, or begin a new run"
            )

    def begin(self, dataset: Dataset, precision: Precision) -> None:
        """Drop what an earlier run left, and keep what rows must pass to be scored. precision: of
        the run.
        """
        self.clear(precision)
        dataset.transforms.save(self.path)

    def clear(self, precision: Precision) -> None:
        """Drop what an earlier run left.

        precision: of the run that follows; if `auto` has chosen it, what it wrote stays.
        """
        checkpoint.clear(self.checkpoints)
        names = [*MADE, *files_of_all()]
        if not is_recipe_of(self.path / AUTO_FILE, precision):
            names.append(AUTO_FILE)
        for name in names:
            (self.path / name).unlink(missing_ok=True)
        for name in ("tensorboard", CALIBRATORS):
            shutil.rmtree(self.path / name, ignore_errors=True)

    def remove_leftovers(self) -> None:
        """Remove the hidden folders of a search or of `--precision auto` that was killed here."""
        with suppress(OSError):  # they are in nobody's way
            clean(self.path, forget)

    def require_free(self, overwrite: bool) -> None:
        """Check that no run is in the way, or that it may be dropped.

        Raises:
            UserError: when one is.
        """
        self._look(False, overwrite)

    def write(self, run: Run) -> None:
        """Write the settings. A run that was to have calibrators, and is to have none any more,
        loses them.
        """
        file = self.path / "run.toml"
        folder = self.path / CALIBRATORS
        if run.calibrator == "none" and folder.exists() and Run.load(file).calibrator != "none":
            shutil.rmtree(folder)
        self.with_maps(run).save(file)

    def with_maps(self, run: Run) -> Run:
        """Returns the run with the files that addressings of tables read copied into the
        directory.
        """
        sizes = {}
        for table, settled in run.tables.sizes.items():
            if "file" in settled:
                map_file = self.path / "maps" / quote(table, safe="")
                map_file.parent.mkdir(exist_ok=True)
                if not map_file.exists() or not map_file.samefile(settled["file"]):
                    with replace_file(map_file) as partial:
                        shutil.copyfile(settled["file"], partial)
                settled = {**settled, "file": str(map_file)}
            sizes[table] = settled
        return dataclasses.replace(run, tables=dataclasses.replace(run.tables, sizes=sizes))

    @contextmanager
    def locked(self) -> Iterator[str]:
        """Keep a second training out of the directory. The system lets go when this process ends.

        Yields what the lock holds from now on, by which others know the directory.

        Raises:
            UserError: for a directory of something else, which a run would spoil.
        """
        if (self.path / "manifest.json").exists():
            raise UserError(f"{self.path}: is a prepared log; choose another --run_dir")
        if not any((self.path / name).exists() for name in (LOCK, "run.toml")):
            for name in (
                "schema.toml",
                "vocabulary",
                "maps",
                "checkpoints",
                "tensorboard",
                CALIBRATORS,
                *MADE,
                *files_of_all(),
            ):
                if (self.path / name).exists():
                    raise UserError(
                        f"{self.path}: no run's, and holds {name}; choose another --run_dir"
                    )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            file = open(self.path / LOCK, "a", encoding="utf-8")  # noqa: SIM115 - closed below
        except OSError as error:
            raise cannot_write(self.path, error) from error
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                place = f"{self.path}: another training is running here"
                raise UserError(f"{place}; wait for it or choose another --run_dir") from None
            token = uuid.uuid4().hex
            file.truncate(0)
            file.write(token)
            file.flush()
            os.fsync(file.fileno())
            yield token


def forget(run_dir: Path) -> None:
    """Remove what a run has outside its directory, which is about to be removed."""
    for module in modules_elsewhere(run_dir):
        module.forget(run_dir)


def _write_and_remove(file: Path) -> None:
    """Write as much as a full disk would refuse, and remove it."""
    try:
        with open(file, "wb") as opened:
            opened.write(bytes(4096))
            opened.flush()
            os.fsync(opened.fileno())
    finally:
        with suppress(OSError):
            file.unlink()


class Held(ExitStack):
    """Has a run's directory for this process alone until it is closed."""

    token: str | None = None

    def take(self, dir: RunDir) -> str:
        """Take the directory, unless it was taken before. Returns what its lock holds, see
        `RunDir.locked`.
        """
        if self.token is None:
            self.token = self.enter_context(dir.locked())
        return self.token
