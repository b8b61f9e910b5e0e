"""What a model folder says about its model: how well it ranks, and what its training rows were like."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparrow import data
from sparrow.core.progress import Progress
from sparrow.features.encodings import MISSING, UNKNOWN
from sparrow.metrics import labelled
from sparrow.metrics.intervals import estimates
from sparrow.trained.calibrators import kind_of
from sparrow.trained.parts import Scores, scored, scored_batches

BINS = 50


def card(found: Scores, dataset: data.Dataset, told: Progress) -> dict[str, Any]:
    """Returns what a model folder says about its model: how well it ranks, and what its training rows were like.

    A service compares what it is asked with that. At most MOST rows of a part are read.

    Args:
        found: the model.
        dataset: the log that it was trained on.
        told: is told how far it is.
    """
    labels = found.schema.labels
    parts: dict[str, Any] = {}
    for split in ("valid", "test"):
        if not dataset.rows(split) or not labels:
            continue
        scores_BT, labels_BT, weights_B, session_B = scored(found, dataset, split, told)
        of_labels = {}
        for t, label in enumerate(labels):
            y_B, *rest = labelled(labels_BT[:, t], scores_BT[:, t], weights_B, session_B)
            made = estimates(rest[0], y_B, *rest[1:])
            of_labels[label] = {name: {"value": one.value, "error": one.error} for name, one in made.items()}
        parts[split] = {"rows": len(scores_BT), "labels": of_labels}
        if split == "valid" and found.calibrators:
            parts[split]["note"] = f"its {kind_of(found.calibrators)} calibrator was fitted to these rows"
    return {
        "model": found.name,
        "step": found.step,
        "labels": list(labels),
        "metrics": parts,
        "training": _training(found, dataset, told),
    }


def _training(found: Scores, dataset: data.Dataset, told: Progress) -> dict[str, Any]:
    """Returns shares of missing and unknown values, of empty lists, and how scores are distributed."""
    schema, places, rows = found.schema, found.schema.places, 0
    counts = {name: np.zeros(4) for name in (*schema.sparse, *schema.dense)}  # values, unknown, missing, empty lists
    histogram = np.zeros((max(len(schema.labels), 1), BINS), np.int64)
    for scores_BT, batch in scored_batches(found, dataset, "train", told):
        rows += batch.batch_size
        for name in schema.sparse:
            ids = batch.ids[name]
            is_numbered = schema.encodings[str(schema.columns[name].table)].is_numbered
            told_N = (ids.values_N == UNKNOWN) & is_numbered, ids.values_N == MISSING, ids.lengths_B == 0
            counts[name] += [len(ids.values_N), *(int(one.sum()) for one in told_N)]
        for name in places:
            if mark := schema.mark_of(name):
                counts[name][2] += float(batch.dense_BC[:, places[mark]].sum())
            counts[name][0] += batch.batch_size
        for t, scores_B in enumerate(scores_BT.numpy().T):
            histogram[t] += np.histogram(scores_B, BINS, (0, 1))[0]
    shares = {}
    for name, (values, unknown, missing, empty) in counts.items():
        of = schema.columns[name]
        shares[name] = {"missing": (empty if of.kind == "list" else missing) / max(rows, 1)}
        if name not in places:
            shares[name]["unknown"] = unknown / max(values, 1)
    names = schema.labels or ("score",)
    return {"rows": rows, "features": shares, "scores": dict(zip(names, histogram.tolist(), strict=True))}
