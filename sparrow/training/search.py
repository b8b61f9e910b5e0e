"""A short search: several settings are tried on a log, and the run that is best on its valid part
is kept.
"""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparrow import data
from sparrow.core.errors import UserError, require
from sparrow.core.extensions import modules_elsewhere, tries_of_all
from sparrow.core.files import to_json, write_text
from sparrow.core.workplace import workplace
from sparrow.metrics import metric_of
from sparrow.trained.run import Run
from sparrow.training.defaults import defaults
from sparrow.training.loop import Listener, train
from sparrow.training.rundir import LOCK, Held, RunDir, forget

# of models for which no extension says it; each is what differs from the defaults, and those that
# gained most on the logs of benchmarks/vs_trees.py come first
_TRIES: tuple[Mapping[str, Any], ...] = (
    {},
    {"tables.rule.lr": 0.3, "dense.lr": 0.003},
    {"model.name": "deepfm"},
    {"model.name": "dlrm", "tables.rule.lr": 0.3, "dense.lr": 0.003},
    {"tables.rule.lr": 0.015},
    {"model.name": "gdcn"},
)


class _TimeIsUpError(Exception):
    """Ends a try."""


def tries(prepared: str | Path, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns what is tried beside the settings of `defaults`, by dotted name, in order. The first
    is {}.

    A setting that a person gave is in none of them, nor another model where something of the model
    was given.

    Args:
        prepared: the log.
        settings: settings of a person, by dotted name.
    """
    model = str(defaults(prepared, settings).get("model.name", ""))
    changes = tries_of_all().get(model, _TRIES)
    fixed = {
        *settings,
        *(["model.name"] if any(name.startswith("model.") for name in settings) else []),
    }
    if "init_from" in settings:  # which has its model
        for change in changes:
            fixed |= {name for name in change if name.startswith("model.")}
    return [dict(change) for change in changes if not fixed & change.keys()]


def search(
    prepared: str | Path,
    given: Mapping[str, Any],
    budget_s: float,
    *,
    overwrite: bool = False,
    listener: Listener | None = None,
    held: Held | None = None,
) -> dict[str, Any]:
    """Train with one of `tries` after the other until the time is up, and keep the run that is best
    on the valid part.

    The first try is never cut short. One that the end of the time comes upon is left out. All have
    the same seed. A signal ends the search with what there is.

    Args:
        prepared: the log.
        given: settings that all tries have, by dotted name.
        budget_s: seconds.
        overwrite: drop another run that is in the run directory.
        listener: hears how it goes, see `train`.
        held: see `train`.

    Returns:
        The results of `train` of the run that was kept, with "tries": of each its settings
        ("changed"), its value of "monitor" on the valid part or None where it did not end, its
        "seconds", and whether it was "kept".

    Raises:
        UserError: when the log has no valid rows, a run is in the way, or the first try fails.
    """
    require(above=0, budget=budget_s)
    plain = Run.of(prepared, defaults(prepared, given))
    place = Path(plain.run_dir)
    monitor = plain.loop.monitor
    began = time.monotonic()
    if not data.open(prepared).rows("valid"):
        raise UserError(
            f"budget: {prepared} has no valid rows to choose by; prepare it with some, or leave"
            " it out"
        )
    run_dir = RunDir(place)
    run_dir.require_free(overwrite)
    tries_made: list[dict[str, Any]] = []
    results_of_runs: list[dict[str, Any]] = []
    stopped_by: str | None = None
    with Held() as until_end, workplace(place, forget) as (work, _):
        (held or until_end).take(run_dir)
        for number, change in enumerate(tries(prepared, given)):
            hear = _Timed(listener, began + budget_s if number else math.inf)
            if time.monotonic() >= hear.end:
                break
            hear("note", {"text": f"try {number + 1}: {_in_words(change)}"})
            settings = {
                **defaults(prepared, {**change, **given}),
                "run_dir": str(work / str(number)),
            }
            tries_made.append({"changed": change, "monitor": monitor, "value": None, "kept": False})
            since = time.monotonic()
            try:
                results_of_runs.append(train(Run.of(prepared, settings), listener=hear))
                tries_made[-1]["value"] = results_of_runs[-1]["best"].get(monitor)
            except _TimeIsUpError:
                pass
            except KeyboardInterrupt:  # before its first step
                if not results_of_runs:
                    raise
                stopped_by = "SIGINT"
            except UserError as error:  # it diverged, or needs more memory than there is
                if not number:
                    raise
                hear("note", {"text": f"try {number + 1}: {error}"})
            tries_made[-1]["seconds"] = time.monotonic() - since
            stopped_by = stopped_by or results_of_runs[-1]["stopped_by"]
            if stopped_by:
                break
        values = [attempt["value"] for attempt in tries_made]
        best = min(range(len(values)), key=lambda i: _cost(values[i], monitor))
        tries_made[best]["kept"] = True
        by_number = {Path(results["run_dir"]).name: results for results in results_of_runs}
        results = by_number[str(best)]
        results |= {"run_dir": str(place), "tries": tries_made, "stopped_by": stopped_by}
        best_dir = work / str(best)
        dataclasses.replace(Run.load(best_dir / "run.toml"), run_dir=str(place)).save(
            best_dir / "run.toml"
        )
        write_text(best_dir / "results.json", to_json(results, indent=1))
        forget(place)
        _move(best_dir, run_dir)
    return results


def _move(work_dir: Path, run_dir: RunDir) -> None:
    """Move the files of a run to its directory, the checkpoints last: without these there is no
    run.
    """
    run_dir.clear(Run.load(work_dir / "run.toml").precision)
    for module in modules_elsewhere(work_dir):
        module.hand_over(work_dir, run_dir.path)
    files = [path for path in work_dir.iterdir() if path.name != LOCK]
    for path in sorted(files, key=lambda path: path.name == run_dir.checkpoints.name):
        target = run_dir.path / path.name
        if target.is_dir():
            shutil.rmtree(target)
        os.replace(path, target)


@dataclasses.dataclass(frozen=True)
class _Timed:
    """A listener that ends a run when its time is up. end: by `time.monotonic`."""

    listener: Listener | None
    end: float

    def __call__(self, event: str, values: dict[str, Any]) -> None:
        if self.listener:
            self.listener(event, values)
        if event in ("progress", "evaluation") and time.monotonic() > self.end:
            raise _TimeIsUpError


def _cost(value: float | None, monitor: str) -> float:
    if value is None or math.isnan(value):
        return math.inf
    return metric_of(monitor).cost(value)


def _in_words(change: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in change.items()) or "the defaults"
