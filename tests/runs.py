"""Runs on prepared logs: `small_run` is quick and the same in all tests, `run_of` has Sparrow's
defaults.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sparrow.data.batches.loader import Share
from sparrow.embeddings import TableChoices
from sparrow.kernels.rules import rowwise_adagrad
from sparrow.models import dlrm
from sparrow.optimizers import adam
from sparrow.trained.run import Checkpoints, Data, Log, Run, Schedule
from sparrow.training import Trainer


def small_run(prepared: Path, run_dir: Path, *, batch_size: int = 256, **changes: Any) -> Run:
    """A small DLRM on one thread, with checkpoints on its way. changes: fields of `Run`."""
    run = Run(
        run_dir=str(run_dir),
        data=Data(path=str(prepared), batch_size=batch_size),
        model=dlrm.Config(dim=4, bottom=(8,), top=(8,)),
        tables=TableChoices(rule=rowwise_adagrad.Config(lr=0.1)),
        dense=adam.Config(lr=3e-3),
        schedule=Schedule(warmup_steps=3, decay="cosine", hold=0.0),
        checkpoint=Checkpoints(every=4),
        log=Log(every=3, tensorboard=False),
        threads=1,
    )
    return dataclasses.replace(run, **changes)


def on_disk(run: Run, folder: Path, **settings: Any) -> Run:
    """A run with its rows of tables on an SSD in a folder. settings: others of tiers."""
    from sparrow.extensions.tiers import settings as tiers  # runs in memory do not load it

    return run.with_settings(tiers.Config(folder=str(folder), **settings))


def learn(trainer: Trainer, shares: Sequence[Share]) -> None:
    """A step of a run, on other shares than its feed has."""
    trainer.record(trainer.course.learn(shares, trainer.progress.step))


def run_of(prepared: Path | str, run_dir: Path | str, **settings: Any) -> Run:
    """A run of defaults, on one thread. settings: by dotted name, as on the command line."""
    return Run.of(
        prepared, {"run_dir": str(run_dir), "threads": 1, "log.tensorboard": False, **settings}
    )
