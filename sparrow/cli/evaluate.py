"""Measure a trained model on a part of its prepared log."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

import tyro

from sparrow.cli._parse import call

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
        data: Another prepared log with the same schema, or where the run's is now.
        checkpoint: "best" (else the last), "last", or a step number.
        device: cpu or cuda; by default that of the run.
        k: How many places of a request's candidates count in recall@k, NDCG@k and hit rate@k.
        slices: Columns; each of their values is measured alone, too.
        json_out: Also write the numbers there.
    """
    from sparrow.analysis.scores import score_part
    from sparrow.analysis.slices import judge_slices
    from sparrow.analysis.slices import slices as check
    from sparrow.cli import _ranking, _show
    from sparrow.core.errors import UserError
    from sparrow.core.files import to_json, write_text
    from sparrow.metrics import evaluate as measure
    from sparrow.metrics import evaluate_labels
    from sparrow.trained.log import open_log
    from sparrow.trained.scorer import restore

    model = restore(run_dir, which=checkpoint, device=device, data_dir=data)
    dataset = open_log(model)
    if not dataset.rows(split):
        raise UserError(
            f"{dataset.path}: its {split} part is empty; choose another --split, or prepare with a"
            " larger share"
        )
    for column in slices:
        check(dataset, split, column)  # a wrong name should not cost a pass over the rows
    labels = model.schema.labels
    suffixes = [f": {label}" for label in labels] if len(labels) > 1 else [""]
    loader = dataset.loader(model.run.data.batch_size, split=split, dedup=model.run.data.dedup)
    results = evaluate_labels(model.scores, loader, range(len(labels)), ks=k, model=model.model)
    name = f"{model.name}, step {model.step}{model.through(dataset.fingerprint, split)}"
    rows = [(f"{name}{suffix}", metrics) for suffix, metrics in zip(suffixes, results, strict=True)]
    for name, loader in dataset.baselines(split):
        rows.append((f"{name}{suffixes[0]}", measure(lambda batch: batch.dense_BC, loader, ks=k)))
    _show.out.print(_show.metrics_table(rows, f"{split} part of {dataset.path}"))
    if any("mrr" in metrics for _, metrics in rows):
        _show.out.print(_ranking.ranking_table(rows, k))
    elif k != PLACES:
        _show.notes([_unranked(has_groups=model.schema.role("group") is not None)])
    for t, suffix in enumerate(suffixes if slices else ()):
        scored = score_part(model, dataset, split, lambda what, done, total: None, t)
        for column in slices:
            table = [
                (f"{column} = {piece.value}{suffix}", piece.metrics())
                for piece in judge_slices(scored, dataset, split, column)
            ]
            _show.out.print(_show.metrics_table(table, f"{model.name}, by {column}"))
            rows += table
    _show.notes(_undefined(labels, results))
    if model.mixing:
        _show.notes([f"{model.mixing}, {model.run.data.batch_size:,} at a time"])
    _show.notes(f"{text} (all parts of the log)" for text in dataset.skew().notes(dataset.schema))
    if json_out is not None:
        write_text(json_out, to_json(dict(rows), indent=1))


def _unranked(*, has_groups: bool) -> str:
    """Returns why places have no metrics."""
    if not has_groups:
        return "no recall@k, NDCG@k and hit rate@k, as no column is a group; a schema can name one"
    return "a label lies between 0 and 1, so there is no recall@k, NDCG@k and hit rate@k; see gauc"


def main(arguments: Sequence[str]) -> None:
    """`sparrow evaluate RUN [--split test]`."""
    try:
        call(evaluate, arguments, "evaluate")
    finally:
        if any(argument in ("-h", "--help") for argument in arguments):
            _help()


def _help() -> None:
    """Print the metrics, and what each is."""
    from sparrow.cli import _show
    from sparrow.metrics import METRICS

    _show.out.print("metrics, in the order in which they are shown:")
    for metric in METRICS.values():
        text = f"  {metric.name:<12} {metric.title}; {metric.better} is better. {metric.meaning}"
        _show.out.print(text.rstrip(), markup=False, soft_wrap=True)


def _undefined(labels: Sequence[str], results: Sequence[Mapping[str, float]]) -> Iterator[str]:
    """Yields a note for each label of which all rows have one outcome, or none counts."""
    for label, metrics in zip(labels, results, strict=True):
        rows = f"all {metrics['examples']:,.0f} rows"
        rate = metrics["base_rate"]
        if metrics["examples"] and math.isnan(rate):
            reason = f"the weights of {rows} that have {label} are 0, so no figure has a value"
            yield f"{reason}; judge by rows that count (--split, or --data)"
        if metrics["examples"] and rate in (0, 1):
            reason = f"{rows} have {label} {int(rate)}, so AUC and NE have no value"
            yield f"{reason}; judge by rows with both outcomes (--split, or --data)"
