"""A run directory, and the jobs that train there, on a small log."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sparrow import checkpoint
from sparrow.trained.run import Run
from sparrow.training.loop import Trainer
from tests.faults.job import Job

EVERY = 5
SETTINGS: dict[str, Any] = {
    "sharding.plan": "row_wise", "threads": 1, "data.batch_size": 48,
    "model.name": "dcnv2", "model.dim": 8, "model.deep": [16],
    "checkpoint.every": EVERY, "loop.evaluate_every": 40, "log.tensorboard": False,
}  # fmt: skip


class Training:
    """A run directory and the jobs that train there."""

    def __init__(self, prepared: Path, place: Path) -> None:
        self.prepared, self.dir, self.said = prepared, place / "run", place / "said"

    def command(self, *arguments: str, **settings: Any) -> list[str]:
        """What every rank is to run."""
        chosen = {
            **SETTINGS,
            **{name.replace("__", "."): value for name, value in settings.items()},
        }
        options = [
            text
            for name, value in chosen.items()
            for text in (f"--{name}", json.dumps(value).strip('"'))
        ]
        return [
            "-m",
            "sparrow",
            "train",
            str(self.prepared),
            "--run_dir",
            str(self.dir),
            *options,
            *arguments,
        ]

    @contextmanager
    def job(self, ranks: int, *arguments: str, restarts: int = 0, **settings: Any) -> Iterator[Job]:
        """A job that runs, and is ended if the test did not."""
        job = Job(ranks, self.command(*arguments, **settings), self.said, restarts)
        try:
            yield job
        finally:
            job.close()

    def trainer(self, **how: Any) -> Trainer:
        """The same on one rank, in this process."""
        return Trainer(Run.of(str(self.prepared), {"run_dir": str(self.dir), **SETTINGS}), **how)

    @property
    def step(self) -> int:
        """The last checkpoint's step."""
        return checkpoint.latest(self.dir / "checkpoints") or 0

    @property
    def results(self) -> dict[str, Any]:
        """What the job found."""
        found: dict[str, Any] = json.loads((self.dir / "results.json").read_text())
        del found["run_dir"]
        return found

    @property
    def files(self) -> dict[str, bytes]:
        """The last checkpoint, whose manifest says which is best."""
        last = self.dir / "checkpoints" / f"step-{self.step:09d}"
        return {path.name: path.read_bytes() for path in sorted(last.iterdir())}

    def writing(self) -> bool:
        """Whether a checkpoint is being written."""
        return any((self.dir / "checkpoints").glob(".writing-*"))

    def assert_near(self, other: Training) -> None:
        """To 1e-5: products of other shapes, and gradients of shares added up, sum in another
        order.
        """
        assert self.results["step"] == other.results["step"]
        for name in ("logloss", "ne", "auc", "calibration"):
            assert self.results["valid"][name] == pytest.approx(
                other.results["valid"][name], rel=1e-5
            )
        for mine, theirs in zip(
            self.results["progressive"], other.results["progressive"], strict=True
        ):
            assert mine["logloss"] == pytest.approx(theirs["logloss"], rel=1e-5)

    def assert_same(self, other: Training) -> None:
        """The same bits."""
        mine, theirs = self.files, other.files
        assert mine.keys() == theirs.keys()
        different = [name for name in mine if mine[name] != theirs[name]]
        assert not different, different
        assert self.results == other.results
