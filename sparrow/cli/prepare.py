"""Turn a raw click log into typed, split, fitted Parquet that training reads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import tyro


def prepare(
    inputs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="INPUT...")],
    /,
    out: Path | None = None,
    schema: Path | None = None,
    label: str | None = None,
    split: Literal["time", "ratio"] | None = None,
    valid: float | None = None,
    test: float | None = None,
    seed: int | None = None,
    overwrite: bool = False,
    infer_only: bool = False,
) -> None:
    """Turn a raw click log into typed, split, fitted Parquet that training reads.

    Without --schema the columns' meaning is inferred and written to OUT/schema.toml, to read, edit and pass back.

    Args:
        inputs: Files or globs, in order: CSV, TSV, Parquet or Criteo's format, .gz and .zst too.
        out: The prepared log, a new directory; needed unless --infer-only.
        schema: A schema to obey; what is fitted may be left out.
        label: The column to predict, when it cannot be guessed.
        split: By time (the last rows are held out) or by ratio (rows at random); time when there is a time column.
        valid: Share of the rows for validation; 0.1 unless told.
        test: Share of the rows for the test; 0.1 unless told.
        seed: Of the split by ratio.
        overwrite: Replace an existing OUT, once the new one is complete.
        infer_only: Print the schema that would be inferred, and stop.
    """
    from sparrow import data
    from sparrow.cli import _show
    from sparrow.core.errors import UserError
    from sparrow.data.schema import Schema, Split

    given = Schema.load(schema) if schema else None
    if infer_only:
        print(data.infer(inputs, label=label).to_toml(), end="")
        return
    if out is None:
        raise UserError("--out: missing; name the folder for the prepared log")
    before = given.split if given else Split()
    wanted = Split(
        by=before.by if split is None else split,
        valid=before.valid if valid is None else valid,
        test=before.test if test is None else test,
        seed=before.seed if seed is None else seed,
    )
    with _show.progress_bar() as progress:
        made = data.prepare(
            inputs, out, schema=given, label=label, split=wanted, overwrite=overwrite, progress=progress
        )
    for note in made.notes:
        _show.out.print(f"note: {note}", markup=False, soft_wrap=True)
    table = _show.Table("part", "rows", "positives")
    for name, rows in made.rows.items():
        table.add_row(name, f"{rows:,}", f"{made.label_mean[name]:.4f}" if rows else "")
    _show.out.print(table)
    _show.out.print(
        f"{out}/schema.toml says what each column is taken for; edit it and pass it back with --schema", soft_wrap=True
    )
