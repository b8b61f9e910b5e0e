"""Write a synthetic click log whose best possible logloss is known."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import tyro

from sparrow.apps.generate.settings import Settings


def generate(out: tyro.conf.Positional[Path], /, *, log: Settings, overwrite: bool = False) -> None:
    """Write a synthetic click log whose best possible logloss is known.

    Args:
        out: The log: .parquet, .csv or .tsv.
        overwrite: Replace an existing log.
    """
    from sparrow.apps.generate import generate as write
    from sparrow.cli import _show

    with _show.progress_bar() as progress:
        generated = write(out, **asdict(log), overwrite=overwrite, progress=progress)
    _show.notes(generated.notes)
    _show.out.print(f"{generated.rows:,} rows -> {out}", soft_wrap=True)
    _show.out.print(f"the best any model can do: {_show.numbers(generated.limit)}", soft_wrap=True)
