"""A raw log and a trained model -> scores."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from sparrow import data
from sparrow.core.errors import UserError, suggest
from sparrow.core.progress import Progress
from sparrow.data.read import types_for
from sparrow.training.restore import restore


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
) -> int:
    """Score every row of a raw log, in order, and return how many there were.

    The rows pass through the transforms fitted for training. out: Parquet with the columns `keep` of the log and
    float32 `score`, a click probability; it appears whole or not at all. which, device: see `restore`.
    Raises UserError for a log that lacks a feature, an `out` that exists, or a run that cannot be restored.
    """
    out = Path(out)
    if out.exists() and not overwrite:
        raise UserError(f"{out}: exists; choose another file, or add --overwrite")
    found = restore(run_dir, which=which, device=device)
    log = data.open_log(inputs, found.schema.source)
    types = types_for(found.schema, log)
    for name in keep:
        if name not in log.types:
            raise UserError(f"keep: no column {name!r}{suggest(name, log.types)}")
        types.setdefault(name, log.types[name])
    told, done = progress or (lambda what, done, total: None), 0
    fields = [pa.field(name, types[name]) for name in keep] + [pa.field("score", pa.float32())]
    partial = out.with_name(f".{out.name}.partial")
    try:
        with pq.ParquetWriter(partial, pa.schema(fields)) as writer, torch.no_grad():
            for rows in log.batches(types):
                table = data.transform(found.schema, rows, training=False, row0=done)
                scores = [
                    found.model.score(batch.to(found.run.device))[:, 0].cpu()
                    for batch in data.batches(found.schema, table, batch_size)
                ]
                kept = [rows.column(name) for name in keep]
                writer.write_table(pa.Table.from_arrays([*kept, torch.cat(scores).numpy()], schema=pa.schema(fields)))
                done += rows.num_rows
                told("scored", done, log.rows)
        os.replace(partial, out)
    finally:
        partial.unlink(missing_ok=True)
    return done
