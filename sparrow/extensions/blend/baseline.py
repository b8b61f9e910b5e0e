"""The logistic regression that a small log's run is compared with: the blend's, fitted to the log
without the others.

It is a model of its own, so that a run of another model loads no other part of the blend.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sparrow.core import Batch
from sparrow.core.memory import let_go
from sparrow.data.batches.dataset import Dataset
from sparrow.data.batches.dataset import open as open_log
from sparrow.extensions.blend.logistic import (
    Logistic,
    bytes_of_examples,
    bytes_of_fit,
    ids_of_columns,
)
from sparrow.extensions.blend.ranges import choose_knots
from sparrow.losses import probabilities
from sparrow.metrics import evaluate
from sparrow.models import MOST_FITTED
from sparrow.models._inputs import Numbers, tasks
from sparrow.trained.build import undo_sampling
from sparrow.trained.run import Run
from sparrow.training.defaults import SMALL_ROWS

RANGES = 32  # of a number, as the blend's by default
MOST_BASELINE = 2 << 30  # bytes

_ROWS = 4096  # that are scored at a time


def has_baseline(dataset: Dataset) -> bool:
    """Returns whether a logistic regression is fitted to a log after training, to compare the run
    with.

    It is not where a blend is not the default, where an id has no number in a table, and where it
    would take more than `MOST_BASELINE` of memory.
    """
    schema = dataset.schema
    is_small = 0 < dataset.rows("train") <= SMALL_ROWS
    if not (is_small and dataset.rows("valid") and schema.labels and all(ids_of_columns(schema))):
        return False
    return bytes_of_baseline(dataset, dataset.first(256)) <= MOST_BASELINE


def bytes_of_baseline(dataset: Dataset, batch: Batch) -> int:
    """Returns about how many bytes of memory it takes to fit a log's baseline. batch: some rows of
    the log.
    """
    rows = min(dataset.rows("train"), MOST_FITTED), min(dataset.rows("valid"), MOST_FITTED)
    schema = dataset.schema
    return bytes_of_examples(schema, batch, rows) + bytes_of_fit(schema, batch, rows)


def fit_baseline(dataset: Dataset) -> Callable[[Batch], Tensor] | None:
    """Fit a logistic regression to a log.

    Returns:
        A function Batch -> click probabilities [B, T] of the whole log; None where `has_baseline`
        says so.
    """
    if not has_baseline(dataset):
        return None
    schema = dataset.schema
    numbers = Numbers(schema)
    regression = Logistic(ids_of_columns(schema), numbers.columns, RANGES, tasks(schema))

    def without_vectors(batch: Batch) -> Batch:
        return replace(batch, ids=batch.ids.expanded(), dense_BC=numbers.plain(batch.dense_BC))

    train, valid = (
        without_vectors(dataset.first(MOST_FITTED, part)) for part in ("train", "valid")
    )
    let_go()  # what reading took is not what fitting takes
    knots_CK1 = choose_knots(train.dense_BC, RANGES)
    offset_T = torch.tensor(dataset.log_odds())
    valid_offset_T = offset_T + math.log(schema.split.negatives)
    regression.fit((train, valid), knots_CK1, (offset_T, valid_offset_T))
    let_go()  # and what fitting took is not what scoring takes

    def score(batch: Batch) -> Tensor:
        batch = without_vectors(batch)
        logits_BT = regression(batch.ids, batch.dense_BC, knots_CK1) + offset_T
        return undo_sampling(probabilities(logits_BT), schema.split.negatives)

    return score


def evaluate_baseline(run: Run, results: Mapping[str, Any]) -> dict[str, float] | None:
    """Returns the metrics of a log's baseline for the valid part, beside those of a run that has
    ended.

    None for a run that was stopped, for a blend, of which it is a part, and where `fit_baseline`
    fits none.

    Args:
        run: its settings; automatic choices need not be made.
        results: as `train` returned them.
    """
    valid = results["best"] or results["valid"]
    if results["stopped_by"] or not valid or valid.get("parts"):
        return None
    let_go()  # what training took is not what fitting takes
    dataset = open_log(run.data.path)
    score = fit_baseline(dataset)
    return score and evaluate(score, dataset.loader(_ROWS, split="valid"))
