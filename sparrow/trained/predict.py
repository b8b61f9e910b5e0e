"""A raw log and a trained model -> scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from sparrow.core.errors import UserError, require, suggest
from sparrow.core.files import refuse_existing, replace_file
from sparrow.core.progress import Progress
from sparrow.data.logs.read import open_like
from sparrow.data.logs.text_types import types_for
from sparrow.data.meaning.separators import require_separators
from sparrow.features.skew import Skew, new_columns
from sparrow.trained.scorer import restore


def predict(
    run_dir: str | Path,
    inputs: Sequence[str | Path],
    out: str | Path,
    *,
    keep: Sequence[str] = (),
    which: str = "best",
    device: str | None = None,
    batch_size: int = 8192,
    overwrite: bool = False,
    progress: Progress | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> int:
    """Score every row of a raw log, in order, and each candidate of a row. Returns how many there
    were.

    The rows pass through the transforms that were fitted for training.

    Args:
        run_dir: the run directory of the model.
        inputs: the files of the raw log.
        out: the Parquet file to write. It has the columns `keep` of the log and float32 `score`, a
            click probability. Every further label has a column `score_NAME`. The file appears whole
            or not at all.
        keep: columns of the log.
        which: the checkpoint, see `restore`.
        device: see `restore`.
        batch_size: rows per forward.
        overwrite: whether `out` may exist.
        progress: is told how far it is.
        note: is told what a person should look at, see `Skew`.

    Raises:
        UserError: for a log that lacks a feature or has a line that cannot be read, an `out` that
            exists, or a run that cannot be restored.
    """
    out = Path(out)
    if out.suffix != ".parquet":
        raise UserError(f"{out}: scores are written as Parquet; end the name in .parquet")
    refuse_existing(out, overwrite)
    require(least=1, batch_size=batch_size)
    model = restore(run_dir, which=which, device=device)
    source = replace(model.schema.source, bad_rows="stop")  # a row left out would have no score
    log = open_like(inputs, source, model.schema)
    require_separators(log, model.schema)
    if any(file.resolve() == out.resolve() for file in log.files):
        raise UserError(f"{out}: is the log to be scored; choose another name for the scores")
    types = types_for(
        replace(model.schema, columns=model.schema.inputs, groups={}, cluster=None), log
    )
    for name in keep:
        if name not in log.types:
            raise UserError(f"keep: no column {name!r}{suggest(name, log.types)}")
        types.setdefault(name, log.types[name])
    rows_scored = 0
    column_types = log.batch_types(types)
    names = ["score", *(f"score_{name}" for name in model.schema.labels[1:])]
    copied_fields = [pa.field(name, column_types[name]) for name in keep]
    score_fields = [pa.field(name, pa.float32()) for name in names]
    columns = pa.schema([*copied_fields, *score_fields])
    skew = Skew(new=new_columns(model.schema, log.types))
    with replace_file(out) as partial, pq.ParquetWriter(partial, columns) as writer:
        for rows in log.batches(types):
            try:
                scores_NT = model.score_rows(rows, batch_size, rows_scored, skew)
            except UserError as error:
                raise log.located(error, 0) from None
            copied_columns = [rows.column(name) for name in keep]
            writer.write_table(
                pa.Table.from_arrays(
                    [*copied_columns, *map(pa.array, scores_NT.T.copy())], schema=columns
                )
            )
            rows_scored += rows.num_rows
            if progress:
                progress("scored", rows_scored, log.rows)
    for line in skew.notes(model.schema):
        note(line)
    if model.mixing:
        note(f"{model.mixing}, {batch_size:,} at a time")
    return rows_scored
