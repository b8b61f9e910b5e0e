"""A run's directory: who may write there, what a run begins with and what it goes on from."""

from __future__ import annotations

import dataclasses
import fcntl
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sparrow import checkpoint
from sparrow.core import UserError
from sparrow.core.config import flatten, to_dict
from sparrow.core.files import cannot_write
from sparrow.data import Dataset
from sparrow.data.schema import Schema
from sparrow.training.restore import check_schema
from sparrow.training.run import Run

MADE = ("log.jsonl", "results.json", "curves.png", "profile.json", "trace.json.gz", "report.html")


class RunDir:
    """Where everything about a run is written."""

    def __init__(self, path: Path) -> None:
        self.path, self.checkpoints = path, path / "checkpoints"

    def find(self, resume: bool, overwrite: bool) -> checkpoint.Checkpoint | None:
        """The checkpoint to go on from; UserError rather than mix two runs in one directory."""
        found = checkpoint.latest(self.checkpoints)
        if found is None or overwrite:
            return None
        if not resume:
            raise UserError(
                f"{self.path}: holds a run up to step {found}; add --resume, --overwrite or another --run_dir"
            )
        return checkpoint.load(self.checkpoints, found)

    def check(self, saved: checkpoint.Checkpoint, identity: Mapping[str, Any], dataset: Dataset) -> None:
        """UserError when a checkpoint is of another model, or of another log than this."""
        check_schema(Schema.load(self.path / "schema.toml"), dataset.schema, dataset.path)
        saved.check(identity)
        if saved.state.get("data") != dataset.fingerprint:
            raise UserError(
                f"{dataset.path}: the prepared log is not the one that this run began with; prepare it as it was, "
                "or begin a new run"
            )

    def continued(self, run: Run, say: Callable[[str], None]) -> Run:
        """`run` with the automatic choices that its beginning made; what else changed is said."""
        before = Run.load(self.path / "run.toml")
        loop, data = run.loop, run.data
        if loop.update_mode == "auto":
            loop = dataclasses.replace(loop, update_mode=before.loop.update_mode)
        shuffle = before.data.shuffle if data.shuffle is None else data.shuffle
        data = dataclasses.replace(data, batch_size=data.batch_size or before.data.batch_size, shuffle=shuffle)
        run = dataclasses.replace(run, threads=run.threads or before.threads, loop=loop, data=data)
        old, new = flatten(to_dict(before)), flatten(to_dict(run))
        for name in sorted(old.keys() | new.keys()):
            if old.get(name) != new.get(name):
                say(f"resumed with {name} = {new.get(name)}, it was {old.get(name)}")
        return run

    def begin(self, dataset: Dataset) -> None:
        """Drop what an earlier run left, and keep what rows must pass to be scored."""
        checkpoint.clear(self.checkpoints)
        for name in MADE:
            (self.path / name).unlink(missing_ok=True)
        shutil.rmtree(self.path / "tensorboard", ignore_errors=True)
        dataset.transforms.save(self.path)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep a second training out of the directory; the system lets go when this process ends."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            file = open(self.path / ".lock", "w", encoding="utf-8")  # noqa: SIM115 - closed below
        except OSError as error:
            raise cannot_write(self.path, error) from error
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                place = f"{self.path}: another training is running here"
                raise UserError(f"{place}; wait for it or choose another --run_dir") from None
            yield
