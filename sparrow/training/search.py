"""A short search: several settings are tried on a log, and the run that is best on its valid part is kept."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparrow import data
from sparrow.core.errors import UserError, require
from sparrow.core.files import to_json, write_text
from sparrow.core.workplace import workplace
from sparrow.trained.run import Run
from sparrow.training.blocks import forget
from sparrow.training.defaults import defaults
from sparrow.training.loop import Listener, train
from sparrow.training.rundir import Held, RunDir

# each is what differs from the defaults; those that gained most on the logs of benchmarks/vs_trees.py come first
_OF_BLENDS: tuple[dict[str, Any], ...] = (
    {},
    {"model.dim": 8, "model.dropout": 0.3},
    {"model.deep": [256, 256], "model.dropout": 0.2},
    {"tables.rule.lr": 0.001},
    {"dense.lr": 0.003},
    {"model.dim": 32, "model.members": 16},
)
_OF_OTHERS: tuple[dict[str, Any], ...] = (
    {},
    {"tables.rule.lr": 0.3, "dense.lr": 0.003},
    {"model.name": "deepfm"},
    {"model.name": "dlrm", "tables.rule.lr": 0.3, "dense.lr": 0.003},
    {"tables.rule.lr": 0.015},
    {"model.name": "gdcn"},
)


class _TimeIsUpError(Exception):
    """Ends a try."""


def tries(prepared: str | Path, given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns what is tried beside the settings of `defaults`, by dotted name, in order. The first is {}.

    A setting that a person gave is in none of them, nor another model where something of the model was given.

    Args:
        prepared: the log.
        given: settings of a person, by dotted name.
    """
    is_blend = defaults(prepared, given).get("model.name") == "blend"
    fixed = {*given, *(["model.name"] if any(name.startswith("model.") for name in given) else [])}
    if "init_from" in given:  # which has its model
        fixed |= {name for change in (*_OF_BLENDS, *_OF_OTHERS) for name in change if name.startswith("model.")}
    return [change for change in (_OF_BLENDS if is_blend else _OF_OTHERS) if not fixed & change.keys()]


def search(
    prepared: str | Path,
    given: Mapping[str, Any],
    budget_s: float,
    *,
    overwrite: bool = False,
    listener: Listener | None = None,
    held: Held | None = None,
) -> dict[str, Any]:
    """Train with one of `tries` after the other until the time is up, and keep the run that is best on the valid part.

    The first try is never cut short. One that the end of the time comes upon is left out. All have the same seed. A
    signal ends the search with what there is.

    Args:
        prepared: the log.
        given: settings that all tries have, by dotted name.
        budget_s: seconds.
        overwrite: drop another run that is in the run directory.
        listener: hears how it goes, see `train`.
        held: see `train`.

    Returns:
        The results of `train` of the run that was kept, with "tries": of each its settings ("changed"), its value of
        "monitor" on the valid part or None where it did not end, its "seconds", and whether it was "kept".

    Raises:
        UserError: when the log has no valid rows, a run is in the way, or the first try fails.
    """
    require(above=0, budget=budget_s)
    plain = Run.of(prepared, defaults(prepared, given))
    place, monitor, began = Path(plain.run_dir), plain.loop.monitor, time.monotonic()
    if not data.open(prepared).rows("valid"):
        raise UserError(f"budget: {prepared} has no valid rows to choose by; prepare it with some, or leave it out")
    kept = RunDir(place)
    kept.require_free(overwrite)
    told: list[dict[str, Any]] = []
    found: list[dict[str, Any]] = []
    stopped_by: str | None = None
    with Held() as mine, workplace(place, forget) as (work, _):
        (held or mine).take(kept)
        for number, change in enumerate(tries(prepared, given)):
            hear = _Timed(listener, began + budget_s if number else math.inf)
            if time.monotonic() >= hear.end:
                break
            hear("note", {"text": f"try {number + 1}: {_in_words(change)}"})
            settings = {**defaults(prepared, {**change, **given}), "run_dir": str(work / str(number))}
            told.append({"changed": change, "monitor": monitor, "value": None, "kept": False})
            since = time.monotonic()
            try:
                found.append(train(Run.of(prepared, settings), listener=hear))
                told[-1]["value"] = found[-1]["best"].get(monitor)
            except _TimeIsUpError:
                pass
            except KeyboardInterrupt:  # before its first step
                if not found:
                    raise
                stopped_by = "SIGINT"
            except UserError as error:  # it diverged, or needs more memory than there is
                if not number:
                    raise
                hear("note", {"text": f"try {number + 1}: {error}"})
            told[-1]["seconds"] = time.monotonic() - since
            stopped_by = stopped_by or found[-1]["stopped_by"]
            if stopped_by:
                break
        values = [one["value"] for one in told]
        best = min(range(len(values)), key=lambda i: _cost(values[i], monitor))
        told[best]["kept"] = True
        results = next(one for one in found if Path(one["run_dir"]).name == str(best))
        results |= {"run_dir": str(place), "tries": told, "stopped_by": stopped_by}
        made = work / str(best)
        dataclasses.replace(Run.load(made / "run.toml"), run_dir=str(place)).save(made / "run.toml")
        write_text(made / "results.json", to_json(results, indent=1))
        forget(place)
        kept.take(made)
    return results


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
    return value if monitor in ("ne", "logloss") else -value


def _in_words(change: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in change.items()) or "the defaults"
