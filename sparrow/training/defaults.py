"""The settings with which a log is trained where a person gives none."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparrow import data
from sparrow.core.config import flatten, named, read_toml
from sparrow.trained.run import Run

SMALL_ROWS = 500_000  # of training; a larger log is trained once, in its own order
SMALL: dict[str, Any] = {
    "model.name": "blend",
    "tables.rule.name": "rowwise_adam",
    "tables.rule.lr": 0.0003,
    "loop.epochs": 10,
    "loop.patience": 2,
    "data.batch_size": 256,
}


def defaults(prepared: str | Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings for a run on a prepared log, by dotted name: those given, and `SMALL` where
    the log is small.

    With another model, on a GPU, or without valid rows that end the training, a small log is
    trained like a large one. What begins with another run's weights has that one's model and
    optimizers, for one epoch if there are no valid rows. Of a member of a family that is given, the
    settings are its own.

    Args:
        prepared: the log.
        settings: settings of a person, by dotted name.

    Raises:
        UserError: when it is no prepared log.
    """
    settings = named(Run, settings)
    rows = data.open(prepared).manifest["rows"]
    begun = _begun_with(settings.get("init_from"))
    model = settings.get("model.name") or begun.get("model.name")
    is_small = (
        rows["train"] <= SMALL_ROWS and rows["valid"] and settings.get("device", "cpu") == "cpu"
    )
    small = SMALL if model == "blend" or (not model and is_small) else {}
    left_out = [name.removesuffix("name") for name in settings if name.endswith(".name")]
    if not rows["valid"]:
        left_out.append("loop.")  # nothing would say when to stop
    chosen = {
        name: value
        for name, value in {**small, **begun}.items()
        if not name.startswith(tuple(left_out))
    }
    return {**chosen, **settings}


def _begun_with(run_dir: Any) -> dict[str, Any]:
    """Returns what a run must have in common with the one that it begins with, by dotted name."""
    file = Path(str(run_dir)) / "run.toml"
    if not run_dir or not file.is_file():  # training says what is wrong
        return {}
    leaves = flatten(read_toml(file))
    return {
        name: value
        for name, value in leaves.items()
        if name.startswith(("model.", "tables.rule.", "dense."))
    }
