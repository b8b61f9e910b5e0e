"""`sparrow train --budget`: how long settings are tried, and what came of each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from sparrow.core.errors import UserError
from sparrow.distributed import begin_lobby


def seconds(text: str) -> float:
    """Returns the seconds of a time such as 60s, 10m, 2h or 90."""
    unit = {"s": 1, "m": 60, "h": 3600}.get(text[-1:], 0)
    try:
        duration_s = float(text[:-1] if unit else text) * (unit or 1)
    except ValueError:
        duration_s = 0.0
    if not 0 < duration_s < math.inf:
        raise UserError(f"--budget {text}: not a time; give one such as 60s, 10m or 2h")
    return duration_s


def check(prepared: Path, is_alone: bool) -> None:
    """Check that settings can be tried: on a prepared log, in one process.

    Args:
        prepared: what to train on.
        is_alone: whether no flag was given that a search cannot heed.

    Raises:
        UserError: when they cannot.
    """
    if not prepared.is_dir():
        raise UserError(
            f"--budget: {prepared} is a run file, whose settings are chosen; give a prepared log"
        )
    if not is_alone:
        remedy = "leave --resume, --profile and --probe out"
        raise UserError(f"--budget: neither goes on with a run nor looks into one; {remedy}")
    if begin_lobby(1.0).size > 1:
        raise UserError("--budget: tries settings in one process; start it without torchrun")


def tries_table(tries: Sequence[dict[str, Any]], label: str) -> Table:
    """Returns a table of the settings that were tried. label: by which they were judged, in
    words.
    """
    table = Table(title=f"what was tried, judged by the valid part{label}", title_justify="left")
    for name in ("beside the defaults", tries[0]["monitor"], "seconds", ""):
        table.add_column(
            name, justify="right" if name in ("seconds", tries[0]["monitor"]) else "left"
        )
    for trial in tries:
        changed = (
            ", ".join(f"{name} {value}" for name, value in trial["changed"].items()) or "nothing"
        )
        value = "not ended" if trial["value"] is None else f"{trial['value']:.4f}"
        table.add_row(changed, value, f"{trial['seconds']:.1f}", "kept" if trial["kept"] else "")
    return table
