"""Write one HTML file about a run: quality, slices, importance, time, tables."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import tyro


def report(
    run_dir: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")],
    /,
    split: Literal["train", "valid", "test"] = "test",
    label: str | None = None,
    by: tuple[str, ...] = (),
    rows: int | None = None,
    out: Path | None = None,
    data: Path | None = None,
    checkpoint: str = "best",
    device: str | None = None,
) -> None:
    """Write one HTML file about a run: quality, slices, importance, time, tables.

    Args:
        run_dir: The directory of a `sparrow train` job.
        split: The part of the prepared log that is looked at.
        label: Which of several labels; the first by default.
        by: Columns to slice it by; by default the time and the most important ones.
        rows: Rows drawn at random for the permutation importance, by default 20,000, and fewer
            where there are many columns; 0 leaves it out.
        out: The file; RUN_DIR/report.html by default.
        data: Where the prepared log is; by default where the run has it.
        checkpoint: "best" (else the last), "last", or a step number.
        device: cpu or cuda; by default that of the run.
    """
    from sparrow.apps.report import report as write
    from sparrow.cli import _show

    with _show.progress_bar() as progress:
        path = write(
            run_dir,
            split=split,
            label=label,
            by=by,
            rows=rows,
            out=out,
            which=checkpoint,
            device=device,
            data_dir=data,
            progress=progress,
        )
    _show.out.print(f"{path}: open it in a browser", soft_wrap=True)
