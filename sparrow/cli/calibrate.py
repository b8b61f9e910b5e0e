"""Fit to a trained model's scores what makes them right on average."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import tyro


def calibrate(
    run_dir: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")],
    kind: Annotated[Literal["logistic", "isotonic", "none"], tyro.conf.Positional],
    /,
    data: Path | None = None,
    checkpoint: str = "best",
    device: str | None = None,
) -> None:
    """Fit to a trained model's scores what makes them right on average.

    It is fitted to the valid part, and judged on the test part. From now on the scores of this
    checkpoint pass through it in evaluate, predict, report, compare and export.
    `sparrow train --calibration.method KIND` does the same at the end of a run.

    Args:
        run_dir: The directory of a `sparrow train` job.
        kind: "logistic" has a slope and an intercept of the log-odds, "isotonic" a rising curve,
            for each label. "none" gives scores as they are.
        data: Where the prepared log is; by default where the run has it.
        checkpoint: "best" (else the last), "last", or a step number.
        device: cpu or cuda; by default that of the run.
    """
    from sparrow.cli import _calibration, _show
    from sparrow.extensions.calibration.calibrate import calibrate as fit

    with _show.progress_bar() as progress:
        fitted = fit(
            run_dir, kind, which=checkpoint, device=device, data_dir=data, progress=progress
        )
    if fitted["test"]:
        _show.out.print(_calibration.metrics_table(fitted))
        _show.notes(_calibration.worse_labels(fitted, run_dir))
    through = "are as the model gives them"
    if kind != "none":
        through = f"pass through {kind} calibrators"
    text = f"{run_dir}: the scores of step {fitted['step']} now {through}"
    _show.out.print(text, markup=False, soft_wrap=True)
