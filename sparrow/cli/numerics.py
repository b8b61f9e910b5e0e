"""Measure what few bits do to each product of a run, and write a page and a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

if TYPE_CHECKING:
    from sparrow.apps.numerics.results import Numerics


def numerics(
    run_dir: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")] = None,
    /,
    precision: str = "mxfp8",
    ne_budget: str = "0.02%",
    rows: int = 20_000,
    data: Path | None = None,
    checkpoint: str = "best",
    formats: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
) -> None:
    """Measure what few bits do to each product of a run, and write a page and a recipe.

    For each product and each of its passes: errors of its outputs on rows of the log, on rows drawn
    from what `sparrow train --probe` learnt, and on N(0, 1); what it alone does to NE of the valid
    part; and what computes it fastest on this machine. RUN/numerics.html shows it, RUN/recipe.toml
    is for `sparrow train --precision`.

    Args:
        run_dir: The directory of a `sparrow train` job. Needed, but with --formats it is not.
        precision: The precision that tables show, such as bf16, mxfp8, mx6 or fp8; the page has a
            map of all.
        ne_budget: How much NE may rise by the recipe's products together, as a share of it.
        rows: Rows of the valid part by which NE is judged, and as many to check the recipe; else
            the log's last rows.
        data: Where the prepared log is; by default where the run has it.
        checkpoint: "best" (else the last), "last", or a step number.
        formats: Show the number formats instead: bits, range, decibels, and the bound of these.
    """
    if formats:
        _show_formats()
        return
    from sparrow.core.errors import UserError

    if run_dir is None:
        raise UserError(
            "numerics: RUN is missing; give the directory of a `sparrow train` job, or --formats"
        )
    from sparrow.apps.numerics.report import PAGE, RECIPE
    from sparrow.apps.numerics.report import numerics as measure
    from sparrow.cli import _show
    from sparrow.cli.quantize import parsed

    with _show.progress_bar() as progress:
        measured = measure(
            run_dir,
            shown=precision,
            budget=parsed(ne_budget),
            rows=rows,
            which=checkpoint,
            data_dir=data,
            progress=progress,
        )
    _show_products(measured)
    _show.notes(measured.notes)
    if measured.rise is not None:
        rise = f"NE is {measured.ne:.5f}; by the recipe it is above that of fp32 by {measured.rise}"
        _show.out.print(f"{rise}, on rows that have not chosen it", markup=False, soft_wrap=True)
    else:
        message = (
            f"no candidate is faster, near enough and within {100 * measured.budget:g} % of NE, so"
            " all stays fp32"
        )
        _show.out.print(message, markup=False, soft_wrap=True)
    _show.out.print(
        f"{run_dir / PAGE}: open it in a browser; {run_dir / RECIPE}: for --precision",
        soft_wrap=True,
    )


def _show_products(measured: Numerics) -> None:
    from sparrow.apps.numerics.page import HEADER, rows
    from sparrow.apps.numerics.report import PAGE
    from sparrow.cli import _show

    title = f"{measured.run_dir}: products in {measured.shown}"
    table = _show.Table(title=title, title_justify="left", box=_show.SLIM)
    shown = [at for at, name in enumerate(HEADER) if name != "why"]  # in words, which the page has
    for at in shown:
        left = HEADER[at] in ("product", "pass", "chosen")
        table.add_column(HEADER[at], justify="left" if left else "right", no_wrap=at == 0)
    for line in rows(measured):
        table.add_row(*(_show.escape(str(line[at])) for at in shown))
    _show.out.print(table)
    message = (
        f"QSNR, MERE and NE alone are those of {measured.shown}; --precision shows another, and"
        f" {PAGE} has a map of all"
    )
    _show.out.print(message, markup=False, soft_wrap=True)


def _show_formats() -> None:
    from sparrow.apps.numerics.formats import HEADER, rows
    from sparrow.cli import _show

    table = _show.Table(title="number formats", title_justify="left", box=_show.SLIM)
    for name in HEADER:
        table.add_column(name, justify="left" if name in ("format", "scale") else "right")
    for line in rows():
        table.add_row(*line)
    _show.out.print(table)
    message = (
        "QSNR is of numbers from N(0, |N(0, 1)|). The bound holds for any numbers: arXiv"
        " 2302.08007, theorem 1."
    )
    _show.out.print(message, markup=False, soft_wrap=True)
