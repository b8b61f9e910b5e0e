"""Measure a trained model on a part of its prepared log."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
import tyro


def evaluate(
    run_dir: tyro.conf.Positional[Path],
    /,
    split: Literal["train", "valid", "test"] = "test",
    data: Path | None = None,
    checkpoint: str = "best",
    device: str | None = None,
    json_out: Path | None = None,
) -> None:
    """Measure a trained model on a part of its prepared log.

    Args:
        run_dir: The directory of a `sparrow train` job.
        split: Which part of the prepared log.
        data: Another prepared log with the same schema; the run's own unless told.
        checkpoint: "best" (else the last), "last", or a step number.
        device: cpu or cuda; the run's own unless told.
        json_out: Also write the numbers there.
    """
    from sparrow import data as logs
    from sparrow.cli import _show
    from sparrow.core.errors import UserError
    from sparrow.metrics import evaluate as measure
    from sparrow.training import restore

    found = restore(run_dir, which=checkpoint, device=device)
    dataset = logs.open(data or found.run.data.path)
    if not dataset.rows(split):
        raise UserError(
            f"{dataset.path}: its {split} part is empty; choose another --split, or prepare with a larger share"
        )
    batches = (batch.to(found.run.device) for batch in dataset.loader(found.run.data.batch_size, split=split))
    with torch.no_grad():
        result = measure(found.model.score, batches, exact=True)
    rows = [(f"{type(found.model).__name__}, step {found.step}", result)]
    for name, loader in dataset.baselines(split):
        rows.append((name, measure(lambda batch: batch.dense_BC, loader, exact=True)))
    _show.out.print(_show.metrics_table(rows, f"{split} part of {dataset.path}"))
    if json_out is not None:
        json_out.write_text(json.dumps(dict(rows), indent=1), encoding="utf-8")


def main(arguments: Sequence[str]) -> None:
    """`sparrow evaluate RUN_DIR`."""
    tyro.cli(evaluate, args=list(arguments), prog="sparrow evaluate")
