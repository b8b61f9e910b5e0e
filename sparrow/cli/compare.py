"""Say whether one trained model differs from another, or from another system's scores, with paired
intervals.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import tyro


def compare(
    a: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="A[,A2,...]")],
    b: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="B[,B2,...]")],
    /,
    split: Literal["train", "valid", "test"] = "test",
    label: str | None = None,
    out: Path | None = None,
    data: Path | None = None,
    checkpoint: str = "best",
    device: str | None = None,
    units: str | None = None,
) -> None:
    """Say whether one trained model differs from another, or from another system's scores, with
    paired intervals.

    Both score the same rows. With several runs on each side, separated by commas, the interval also
    holds the noise of training: `sparrow compare a0,a1,a2 b0,b1,b2`. Another system's scores are a
    baseline column of the prepared log, or a file with a score for each row of the part:
    `sparrow compare runs/a old_score`.

    Args:
        a: A run directory, or several that differ only in their seed; or another system's scores.
        b: What is compared with it.
        split: Which part of the prepared log.
        label: Which of several labels; the first by default.
        out: Also write an HTML file there.
        data: Where the prepared log is; by default where the run has it.
        checkpoint: "best" (else the last), "last", or a step number.
        device: cpu or cuda; by default that of the runs.
        units: The column of what is independent of each other, such as the users; by default the
            group column, else each row is.
    """
    from sparrow.apps.compare import HEADER, lines, to_html
    from sparrow.apps.compare import compare as run
    from sparrow.cli import _show
    from sparrow.core.errors import UserError
    from sparrow.core.files import write_text

    runs_a = [name for name in a.split(",") if name]
    runs_b = [name for name in b.split(",") if name]
    if not runs_a or not runs_b:
        raise UserError(
            f"compare: {a!r} and {b!r} name no run on one side; give a run directory for each"
        )
    with _show.progress_bar() as progress:
        comparison = run(
            runs_a,
            runs_b,
            split=split,
            label=label,
            which=checkpoint,
            device=device,
            data_dir=data,
            units=units,
            progress=progress,
        )
    table = _show.Table(
        title=f"A: {a}   B: {b}   part: {split}   label: {comparison.label}", title_justify="left"
    )
    for name in HEADER:
        table.add_column(
            name,
            justify="left" if name in ("", "verdict") else "right",
            no_wrap=name not in ("A", "B"),
        )
    for line in lines(comparison):
        table.add_row(*line)
    _show.out.print(table)
    for note in comparison.notes:
        _show.out.print(note, markup=False, soft_wrap=True)
    for name, value_a, value_b in comparison.settings:
        _show.out.print(
            f"{name}: {value_a or '-'} in A, {value_b or '-'} in B", markup=False, soft_wrap=True
        )
    if out is not None:
        write_text(out, to_html(comparison))
        _show.out.print(f"{out}: open it in a browser", soft_wrap=True)
