"""The settings with which a log is trained where nobody says others."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparrow import data

SMALL_ROWS = 250_000  # of training; a larger log is trained once, in its own order
SMALL: dict[str, Any] = {
    "model.name": "blend",
    "tables.rule.name": "rowwise_adam",
    "tables.rule.lr": 0.001,
    "loop.epochs": 10,
    "loop.patience": 2,
}


def defaults(prepared: str | Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings for a run on a prepared log, by dotted name: those given, and `SMALL` where the log is small.

    With another model, or without valid rows that end the training, a small log is trained like a large one. Of a
    member of a family that is given, the settings are its own.

    Args:
        prepared: the log.
        given: settings of a person, by dotted name.

    Raises:
        UserError: when it is no prepared log.
    """
    rows = data.open(prepared).manifest["rows"]
    if rows["train"] > SMALL_ROWS or not rows["valid"] or given.get("model.name", "blend") != "blend":
        return dict(given)
    families = tuple(name.removesuffix("name") for name in given if name.endswith(".name"))
    return {**{name: value for name, value in SMALL.items() if not name.startswith(families)}, **given}
