"""Write a trained model as a folder that serves."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import tyro


def export(
    run_dir: tyro.conf.Positional[Path],
    out: tyro.conf.Positional[Path],
    /,
    log: Annotated[tuple[str, ...], tyro.conf.arg(metavar="INPUT...")],
    checkpoint: str = "best",
    check: Literal["rows", "made"] = "rows",
) -> None:
    """Write a trained model as a folder that serves, and load it once to prove that it does.

    The folder has the weights, the rows of the tables, what raw rows pass through, a card with the model's metrics, and
    256 raw rows of the log with their scores. `sparrow.serving.load` refuses a folder that does not reproduce them, or
    of which a byte has changed. The folder appears whole or not at all. It has no optimizer state, no time and no path.

    Args:
        run_dir: The directory of a `sparrow train` job.
        out: The folder to make. It must not exist.
        log: Files or globs of a raw log, as `sparrow prepare` takes them; rows of its beginning are kept.
        checkpoint: "best" (else the last), "last", or a step number.
        check: "rows" keeps rows of the log. "made" draws each column apart, so that no person's row travels.
    """
    from sparrow.cli import _show
    from sparrow.serving.export import export as write

    with _show.progress_bar() as told:
        folder = write(run_dir, out, log, which=checkpoint, check=check, told=told)
    table = _show.Table(
        title=f"{out}: {folder.manifest['model']}, step {folder.manifest['step']}", title_justify="left"
    )
    for name in ("part", "files", "bytes"):
        table.add_column(name, justify="left" if name == "part" else "right")
    parts: dict[str, list[int]] = {}
    for name, of in folder.manifest["files"].items():
        parts.setdefault(name.partition("/")[0], []).append(of["bytes"])
    for name, sizes in parts.items():
        table.add_row(name, f"{len(sizes):,}", f"{sum(sizes):,}")
    table.add_section()
    table.add_row("all", f"{sum(map(len, parts.values())):,}", f"{folder.bytes:,}")
    _show.out.print(table)
    _show.out.print(f"it reproduces the scores of the rows in {out / 'check.parquet'}", soft_wrap=True)
    _show.out.print(f'in Python: sparrow.serving.load("{out}").score([{{...}}])', markup=False, soft_wrap=True)
