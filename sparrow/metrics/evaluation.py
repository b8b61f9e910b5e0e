"""A scoring function and batches -> metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from sparrow.core import Batch, UserError
from sparrow.distributed import World
from sparrow.metrics.across import auc_across, ece_across, groups_across, merged
from sparrow.metrics.places import KS, names
from sparrow.metrics.streaming import Streaming


def evaluate(
    score: Callable[[Batch], Tensor],
    batches: Iterable[Batch],
    *,
    label: int = 0,
    exact: bool = True,
    ks: Sequence[int] = KS,
) -> dict[str, float]:
    """Returns auc, logloss, ne, calibration, ece, base_rate and examples (the number of rows) of all batches.

    Args:
        score: Batch -> probabilities [B] or [B, T]; it runs without gradients.
        batches: what is scored.
        label: the number of the label that is judged.
        exact: the AUC has no binning error. If every batch has sessions, there are also gauc, gauc_groups (how many
            groups it averages), and what `topk` returns. This keeps 12 to 20 bytes a row in host memory, where scores
            are judged. If it is false, the memory is constant, see `Streaming`.
        ks: how many places count in recall@k, NDCG@k and hit rate@k.

    Raises:
        UserError: when a batch has no labels, when scores and labels do not fit, when there are no rows, and for a k
            below 1.
    """
    return evaluate_labels(score, batches, [label], exact=exact, ks=ks)[0]


def evaluate_labels(
    score: Callable[[Batch], Tensor],
    batches: Iterable[Batch],
    labels: Sequence[int],
    *,
    exact: bool = True,
    world: World | None = None,
    ks: Sequence[int] = KS,
) -> list[dict[str, float]]:
    """Returns what `evaluate` returns for each of several labels; every batch is scored once.

    Args:
        score, batches: as for `evaluate`.
        labels: the numbers of the labels.
        exact: as for `evaluate`; it keeps 8 bytes a row for each further label.
        world: ranks that each score their share of the rows. All of them get the metrics of all rows.
        ks: as for `evaluate`.

    Raises:
        UserError: as `evaluate`.
    """
    names(ks)  # a wrong k should not cost a pass over the rows
    judged = list(labels)
    streams = [Streaming() for _ in labels]
    kept = []
    world = world or World()
    with torch.no_grad():
        for batch in batches:
            scores, batch = score(batch).cpu(), batch.on_host.to("cpu")
            if batch.labels_BT is None:
                raise UserError("evaluate: a batch has no labels; use a log with a label column")
            scores = scores if scores.dim() > 1 else scores[:, None]
            if scores.shape != batch.labels_BT.shape or max(judged) >= scores.shape[1]:
                shapes = f"{tuple(scores.shape)} scores for {tuple(batch.labels_BT.shape)} labels"
                raise UserError(f"evaluate: {shapes}; give one score per row and label")
            scores_BT, labels_BT = scores[:, judged], batch.labels_BT[:, judged]
            for t, stream in enumerate(streams):
                stream.update(scores_BT[:, t], labels_BT[:, t], batch.weights_B)
            if exact:
                weights_B = torch.ones_like(scores_BT[:, 0]) if batch.weights_B is None else batch.weights_B
                kept.append((scores_BT, labels_BT, weights_B, batch.session_B))
    streams = merged(world, streams)
    results = [stream.result() | {"ece": stream.ece()} for stream in streams]
    if not results[0]["examples"]:
        raise UserError("evaluate: no rows; give at least one batch that has some")
    if exact and not any(math.isnan(result["logloss"]) for result in results):
        all_scores, all_labels, weights, sessions = zip(*kept, strict=True)
        scores_NT = torch.cat(all_scores)
        labels_NT = torch.cat(all_labels)
        weights_N = torch.cat(weights)
        sessions_N = torch.cat(sessions) if all(session_B is not None for session_B in sessions) else None
        for t, (stream, result) in enumerate(zip(streams, results, strict=True)):
            scores_N, labels_N = scores_NT[:, t], labels_NT[:, t]
            result["auc"] = auc_across(world, stream, scores_N, labels_N, weights_N)
            result["ece"] = ece_across(world, stream, scores_N, labels_N, weights_N)
            if sessions_N is not None:
                result |= groups_across(world, scores_N, labels_N, sessions_N, weights_N, ks)
    return results
