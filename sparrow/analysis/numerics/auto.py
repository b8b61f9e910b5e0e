"""`--precision auto`: a recipe that suits a model and the machine, decided once before a run begins."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from sparrow import data
from sparrow.analysis.numerics.dispatch import as_file, verdicts, within_budget
from sparrow.analysis.numerics.measure import gathered, judge_of
from sparrow.core.config import from_dict
from sparrow.core.errors import UserError
from sparrow.core.files import write_text
from sparrow.layers import Precision
from sparrow.layers.precision import AUTO, recipe_file
from sparrow.trained.run import Run
from sparrow.trained.scorer import restore
from sparrow.training import probe, train
from sparrow.training.loop import Listener
from sparrow.training.rundir import RunDir

FILE = "auto.toml"
STEPS, ROWS = 300, 20_000  # of the short run that is probed, and of the valid part by which it is judged
BUDGET = 0.0002  # by which NE may rise, as a share of it


def settled(run: Run, *, resume: bool, overwrite: bool, listener: Listener | None = None) -> Run:
    """Returns a run with the precision that is decided for it, if that is "auto".

    A short run of fp32 in a temporary folder is probed, and candidates are timed. The recipe is kept as
    `run_dir/auto.toml`. A run that is resumed has the recipe that is there.

    Args:
        run: the settings.
        resume, overwrite: see `train`.
        listener: hears what is done.

    Raises:
        UserError: when nothing can be decided: of many ranks, on an SSD, or with another run in the way.
    """
    if run.precision.name != AUTO:
        return run
    listen, kept = listener or (lambda event, values: None), Path(run.run_dir) / FILE
    if not (resume and kept.exists()):
        if (Path(run.run_dir) / "run.toml").exists() and resume:
            raise UserError(f"precision: {run.run_dir} began without 'auto'; leave --precision out, or --overwrite it")
        RunDir(Path(run.run_dir)).require_free(overwrite)
        listen("note", {"text": f"precision: auto trains at most {STEPS} steps in fp32, and measures their products"})
        text = _decided(run, listen)
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_text(kept, text)
    precision = from_dict(Precision, recipe_file(kept), "precision")
    of = f"{precision.name}, {len(precision.sites)} products by themselves" if precision.sites else precision.name
    listen("note", {"text": f"precision: auto has {of} ({kept})"})
    return replace(run, precision=replace(precision, weights=run.precision.weights))


def _decided(run: Run, listen: Listener) -> str:
    """Returns the recipe file."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("precision: 'auto' is decided in one process; run `sparrow numerics`, and give its recipe.toml")
    if run.ssd is not None or run.compile:
        what = "ssd" if run.ssd is not None else "compile"
        raise UserError(f"precision: 'auto' does not go with {what}; run `sparrow numerics`, and give its recipe.toml")
    with tempfile.TemporaryDirectory(prefix="sparrow-") as folder:
        steps = min(STEPS, run.loop.max_steps or STEPS)
        short: dict[str, Any] = {
            "run_dir": folder,
            "precision": Precision(weights=run.precision.weights),
            "loop": replace(run.loop, max_steps=steps, epochs=1, patience=None, evaluate_every=None),
            "checkpoint": replace(run.checkpoint, every=None, background=False),
            "calibrate": "none",
            "log": replace(run.log, tensorboard=False),
        }

        def heard(event: str, values: dict[str, Any]) -> None:
            if event in ("begin", "progress"):
                listen(event, values)

        train(replace(run, **short), probe=True, listener=heard)
        listen("note", {"text": "precision: auto measures products, and NE with them in fewer bits"})
        found, dataset = restore(folder), data.open(run.data.path)
        learned = probe.load(Path(folder) / probe.FILE)[0]
        sites = gathered(found, dataset, learned or None, quiet)
        alone = verdicts(sites, found.run, quiet)
        precision, _ = within_budget(found, alone, judge_of(dataset, ROWS)[0], BUDGET, quiet)
        return as_file(precision, f"By `sparrow train --precision auto`, after {found.step} steps, for this machine.")


def quiet(what: str, done: int, total: int) -> None:
    """Progress that nobody is shown."""
