"""A raw log and a trained model -> scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from sparrow.core.errors import UserError, require, suggest
from sparrow.core.files import refuse_existing, whole
from sparrow.core.progress import Progress
from sparrow.data.logs.read import open_again, types_for
from sparrow.features.clipped import Clipped
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
    """Score every row of a raw log, in order, and each candidate of a row. Returns how many there were.

    The rows pass through the transforms that were fitted for training.

    Args:
        run_dir: the run directory of the model.
        inputs: the files of the raw log.
        out: the Parquet file to write. It has the columns `keep` of the log and float32 `score`, a click probability.
            Every further label has a column `score_NAME`. The file appears whole or not at all.
        keep: columns of the log.
        which: the checkpoint, see `restore`.
        device: see `restore`.
        batch_size: rows per forward.
        overwrite: whether `out` may exist.
        progress: is told how far it is.
        note: is told what a person should look at, such as numbers beyond training's range.

    Raises:
        UserError: for a log that lacks a feature or has a line that cannot be read, an `out` that exists, or a run that
            cannot be restored.
    """
    out = Path(out)
    if out.suffix != ".parquet":
        raise UserError(f"{out}: scores are written as Parquet; end the name in .parquet")
    refuse_existing(out, overwrite)
    require(least=1, batch_size=batch_size)
    found = restore(run_dir, which=which, device=device)
    source = replace(found.schema.source, bad_rows="stop")  # a row left out would have no score
    log = open_again(inputs, source, found.schema)
    if any(file.resolve() == out.resolve() for file in log.files):
        raise UserError(f"{out}: is the log to be scored; choose another name for the scores")
    types = types_for(replace(found.schema, columns=found.schema.inputs, groups={}, cluster=None), log)
    for name in keep:
        if name not in log.types:
            raise UserError(f"keep: no column {name!r}{suggest(name, log.types)}")
        types.setdefault(name, log.types[name])
    told, done = progress or (lambda what, done, total: None), 0
    text = log.source.format != "parquet"  # read as the schema needs it; Parquet keeps its own types
    fields = [pa.field(name, types[name] if text else log.types[name]) for name in keep]
    scored = ["score", *(f"score_{name}" for name in found.schema.labels[1:])]
    columns = pa.schema([*fields, *(pa.field(name, pa.float32()) for name in scored)])
    clipped = Clipped()
    with whole(out) as partial, pq.ParquetWriter(partial, columns) as writer:
        for rows in log.batches(types):
            try:
                scores_NT = found.score_rows(rows, batch_size, done, clipped)
            except UserError as error:
                raise log.located(error, 0) from None
            kept = [rows.column(name) for name in keep]
            writer.write_table(pa.Table.from_arrays([*kept, *map(pa.array, scores_NT.T.copy())], schema=columns))
            done += rows.num_rows
            told("scored", done, log.rows)
    for line in clipped.notes(found.schema):
        note(line)
    return done
