"""What a calibrator made of the metrics of the test part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from sparrow.cli import _show


def metrics_table(calibrated: Mapping[str, Any]) -> Table:
    """Returns a table of what `calibrate` found on the test part."""
    title = (
        f"{calibrated['kind']} calibrator of step {calibrated['step']}, fitted to the valid part;"
        " on the test part"
    )
    rows = []
    for label, sides in calibrated["test"].items():
        rows += [(f"{label}, {side}", values) for side, values in sides.items()]
    return _show.metrics_table(rows, title)


def worse_labels(calibrated: Mapping[str, Any], run_dir: Path) -> Iterator[str]:
    """Yields a note for each label of whose test part the calibrator makes both NE and ECE
    worse.
    """
    for label, sides in calibrated["test"].items():
        if all(sides["after"][name] > sides["before"][name] for name in ("ne", "ece")):
            undo = f"`sparrow calibrate {run_dir} none` takes the calibrator away"
            yield f"{label}: NE and ECE of the test part are worse after it; {undo}"
