"""Measure a trained model on a part of its prepared log."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import tyro

PLACES = (5, 10)


def evaluate(
    run_dir: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")],
    /,
    split: Literal["train", "valid", "test"] = "test",
    data: Path | None = None,
    checkpoint: str = "best",
    device: str | None = None,
    k: tuple[int, ...] = PLACES,
    slices: tuple[str, ...] = (),
    json_out: Path | None = None,
) -> None:
    """Measure a trained model on a part of its prepared log.

    Args:
        run_dir: The directory of a `sparrow train` job.
        split: Which part of the prepared log.
        data: Another prepared log with the same schema; by default that of the run.
        checkpoint: "best" (else the last), "last", or a step number.
        device: cpu or cuda; by default that of the run.
        k: How many places of a request's candidates count in recall@k, NDCG@k and hit rate@k.
        slices: Columns; each of their values is measured alone, too.
        json_out: Also write the numbers there.
    """
    from sparrow import data as logs
    from sparrow.analysis.scores import score_part
    from sparrow.analysis.slices import judged
    from sparrow.analysis.slices import slices as check
    from sparrow.cli import _show
    from sparrow.core.errors import UserError
    from sparrow.core.files import to_json, write_text
    from sparrow.metrics import evaluate as measure
    from sparrow.metrics import evaluate_labels
    from sparrow.trained.build import check_schema
    from sparrow.trained.scorer import restore

    found = restore(run_dir, which=checkpoint, device=device)
    dataset = logs.open(data or found.run.data.path)
    check_schema(found.schema, dataset.schema, dataset.path)
    if not dataset.rows(split):
        raise UserError(
            f"{dataset.path}: its {split} part is empty; choose another --split, or prepare with a larger share"
        )
    for column in slices:
        check(dataset, split, column)  # a wrong name should not cost a pass over the rows
    labels = found.schema.labels
    of = [f": {label}" for label in labels] if len(labels) > 1 else [""]
    loader = dataset.loader(found.run.data.batch_size, split=split, dedup=found.run.data.dedup)
    results = evaluate_labels(found.scores, loader, range(len(labels)), ks=k)
    name = f"{found.name}, step {found.step}{found.through(dataset.fingerprint, split)}"
    rows = [(f"{name}{which}", one) for which, one in zip(of, results, strict=True)]
    for name, loader in dataset.baselines(split):
        rows.append((f"{name}{of[0]}", measure(lambda batch: batch.dense_BC, loader, ks=k)))
    _show.out.print(_show.metrics_table(rows, f"{split} part of {dataset.path}"))
    if any("mrr" in one for _, one in rows):
        _show.out.print(_show.places_table(rows, k))
    elif k != PLACES and found.schema.role("group") is None:
        _show.notes(["no column has the kind group, so there is no recall@k, NDCG@k and hit rate@k"])
    for t, which in enumerate(of if slices else ()):
        scored = score_part(found, dataset, split, lambda what, done, total: None, t)
        for column in slices:
            table = [
                (f"{column} = {one.value}{which}", one.metrics()) for one in judged(scored, dataset, split, column)
            ]
            _show.out.print(_show.metrics_table(table, f"{found.name}, by {column}"))
            rows += table
    _show.notes(f"{text} (all parts of the log)" for text in dataset.clipped().notes(dataset.schema))
    if json_out is not None:
        write_text(json_out, to_json(dict(rows), indent=1))
