"""What a model folder says about its model: how well it ranks, and what its training rows were
like.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sparrow import data
from sparrow.core.progress import Progress
from sparrow.features.encodings import MISSING, UNKNOWN
from sparrow.metrics import labelled
from sparrow.metrics.intervals import estimates
from sparrow.trained.calibrators import kind_of
from sparrow.trained.parts import Scores, score_batches, score_split

BINS = 50


def card(restored: Scores, dataset: data.Dataset, progress: Progress) -> dict[str, Any]:
    """Returns the card of a model: how well it ranks, and what its training rows were like.

    A service compares what it is asked with that. At most MOST rows of a part are read.

    Args:
        restored: the model.
        dataset: the log that it was trained on.
        progress: shows how far it is.
    """
    labels = restored.schema.labels
    parts: dict[str, Any] = {}
    for split in ("valid", "test"):
        if not dataset.rows(split) or not labels:
            continue
        scores_BT, labels_BT, weights_B, session_B = score_split(restored, dataset, split, progress)
        label_metrics = {}
        for t, label in enumerate(labels):
            y_B, *rest = labelled(labels_BT[:, t], scores_BT[:, t], weights_B, session_B)
            metrics = estimates(rest[0], y_B, *rest[1:])
            label_metrics[label] = {
                name: {"value": x.value, "error": x.error} for name, x in metrics.items()
            }
        parts[split] = {"rows": len(scores_BT), "labels": label_metrics}
        if split == "valid" and restored.calibrators:
            parts[split]["note"] = (
                f"its {kind_of(restored.calibrators)} calibrator was fitted to these rows"
            )
    return {
        "model": restored.name,
        "step": restored.step,
        "labels": list(labels),
        "metrics": parts,
        "notes": (
            [f"{restored.mixing}; a service scores each request alone"] if restored.mixing else []
        ),
        "training": _training(restored, dataset, progress),
    }


def _training(restored: Scores, dataset: data.Dataset, progress: Progress) -> dict[str, Any]:
    """Returns shares of missing and unknown values, of empty lists, and how scores are
    distributed.
    """
    schema = restored.schema
    places = schema.places
    rows = 0
    # values, unknown, missing, empty lists
    counts = {name: np.zeros(4) for name in (*schema.sparse, *schema.dense)}
    histogram = np.zeros((max(len(schema.labels), 1), BINS), np.int64)
    for scores_BT, batch in score_batches(restored, dataset, "train", progress):
        rows += batch.batch_size
        for name in schema.sparse:
            ids = batch.ids[name]
            is_numbered = schema.encodings[str(schema.columns[name].table)].is_numbered
            num_unknown = int((ids.values_N == UNKNOWN).sum()) if is_numbered else 0
            num_missing = int((ids.values_N == MISSING).sum())
            num_empty = int((ids.lengths_B == 0).sum())
            counts[name] += [len(ids.values_N), num_unknown, num_missing, num_empty]
        for name in places:
            if mark := schema.mark_of(name):
                counts[name][2] += float(batch.dense_BC[:, places[mark]].sum())
            counts[name][0] += batch.batch_size
        for t, scores_B in enumerate(scores_BT.numpy().T):
            histogram[t] += np.histogram(scores_B, BINS, (0, 1))[0]
    shares = {}
    for name, (values, unknown, missing, empty) in counts.items():
        column = schema.columns[name]
        shares[name] = {"missing": (empty if column.kind == "list" else missing) / max(rows, 1)}
        if name not in places:
            shares[name]["unknown"] = unknown / max(values, 1)
    names = schema.labels or ("score",)
    return {
        "rows": rows,
        "features": shares,
        "scores": dict(zip(names, histogram.tolist(), strict=True)),
    }
