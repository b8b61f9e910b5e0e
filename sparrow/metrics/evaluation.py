"""A scoring function and batches -> metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from sparrow.core import Batch, UserError
from sparrow.metrics.ranking import auc, gauc
from sparrow.metrics.streaming import Streaming


def evaluate(
    score: Callable[[Batch], Tensor], batches: Iterable[Batch], *, label: int = 0, exact: bool = True
) -> dict[str, float]:
    """auc, logloss, ne, calibration, base_rate and examples of `score` over all of `batches`.

    score: Batch -> probabilities [B] or [B, T]; runs without gradients. label: which of the T is judged. exact: the
    AUC has no binning error and, where every batch has sessions, gauc and gauc_groups (how many it averages) are
    added; this keeps 12 to 20 bytes a row on the batches' device. Else memory is constant, see `Streaming`.
    Raises UserError when a batch has no labels, when scores and labels do not fit, or when there are no rows.
    """
    stream, kept = Streaming(), []
    with torch.no_grad():
        for batch in batches:
            if batch.labels_BT is None:
                raise UserError("evaluate: a batch has no labels; use a log with a label column")
            scores = score(batch)
            scores = scores if scores.dim() > 1 else scores[:, None]
            if scores.shape != batch.labels_BT.shape or label >= scores.shape[1]:
                shapes = f"{tuple(scores.shape)} scores for {tuple(batch.labels_BT.shape)} labels"
                raise UserError(f"evaluate: {shapes}; give one score per row and label")
            scores_B, labels_B = scores[:, label], batch.labels_BT[:, label]
            stream.update(scores_B, labels_B, batch.weights_B)
            if exact:
                weights_B = torch.ones_like(scores_B) if batch.weights_B is None else batch.weights_B
                kept.append((scores_B, labels_B, weights_B, batch.session_B))
    result = stream.result()
    if not result["examples"]:
        raise UserError("evaluate: no rows; give at least one batch that has some")
    if exact:
        all_scores, labels, weights, sessions = zip(*kept, strict=True)
        scores_N, labels_N, weights_N = torch.cat(all_scores), torch.cat(labels), torch.cat(weights)
        result["auc"] = auc(scores_N, labels_N, weights_N)
        if all(session_B is not None for session_B in sessions):
            grouped = gauc(scores_N, labels_N, torch.cat(sessions), weights_N)
            result |= {"gauc": grouped.value, "gauc_groups": grouped.counted}
    return result
