"""Score a raw log with a trained model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro


def predict(
    run_dir: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")],
    inputs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="INPUT...")],
    /,
    out: Path,
    keep: str = "",
    checkpoint: str = "best",
    device: str | None = None,
    batch_size: int = 8192,
    overwrite: bool = False,
) -> None:
    """Score a raw log with a trained model.

    The log passes through the transforms that were fitted for training; it needs no label.

    Args:
        run_dir: The directory of a `sparrow train` job.
        inputs: Files or globs, as `sparrow prepare` takes them.
        out: A Parquet file with one `score` (click probability) per input row, in the input's
            order.
        keep: Columns of the log to copy beside the score, separated by commas.
        checkpoint: "best" (else the last), "last", or a step number.
        device: cpu or cuda; by default that of the run.
        batch_size: Rows scored at a time.
        overwrite: Replace an existing OUT.
    """
    from sparrow.cli import _show
    from sparrow.trained import predict as scoring

    notes: list[str] = []
    columns = [name for name in keep.split(",") if name]
    with _show.progress_bar() as progress:
        rows = scoring.predict(
            run_dir,
            inputs,
            out,
            keep=columns,
            which=checkpoint,
            device=device,
            batch_size=batch_size,
            overwrite=overwrite,
            progress=progress,
            note=notes.append,
        )
    _show.notes(notes)
    _show.out.print(f"{rows:,} scores -> {out}", soft_wrap=True)
