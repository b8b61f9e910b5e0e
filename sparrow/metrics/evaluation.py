"""A scoring function and batches -> metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from sparrow.core import Batch, UserError
from sparrow.core.memory import let_go
from sparrow.distributed import World
from sparrow.metrics._columns import PIECE, ColumnBuffer, labelled
from sparrow.metrics.across import merged
from sparrow.metrics.metric import KS, METRICS, BringsMeasures, topk_names
from sparrow.metrics.streaming import Streaming

# bytes of a row while its AUC and its place in its group are found, 8 for each number of it
JUDGED = 210
# bytes of a row beside its columns: one of them twice, and the piece in which it is judged
CUT = 16


def bytes_of(rows: int, labels: int, has_groups: bool = True) -> int:
    """Returns the bytes of memory that an exact evaluation keeps and takes beside what scores the
    rows.

    Args:
        rows: that one rank scores.
        labels: how many there are.
        has_groups: whether rows have the number of a group, within which they are judged too.
    """
    return scored_bytes(rows, labels, has_groups) + judging_bytes(rows)


def scored_bytes(rows: int, labels: int, has_groups: bool = True) -> int:
    """Returns the bytes of memory that rows take which have been scored. See `bytes_of`."""
    return rows * (4 + 8 * labels + 8 * has_groups)


def judging_bytes(rows: int) -> int:
    """Returns the bytes of memory that it takes to judge rows when all have been scored."""
    return rows * CUT + min(rows, PIECE) * JUDGED


def evaluate(
    score: Callable[[Batch], Tensor],
    batches: Iterable[Batch],
    *,
    label: int = 0,
    exact: bool = True,
    ks: Sequence[int] = KS,
    model: BringsMeasures | None = None,
) -> dict[str, float]:
    """Returns the metrics of METRICS, base_rate and examples (the number of rows) of all batches.

    Args:
        score: Batch -> probabilities [B] or [B, T]; it runs without gradients.
        batches: what is scored.
        label: the number of the label that is judged.
        exact: the AUC has no binning error. If every batch has sessions, there are also gauc,
            gauc_groups (how many groups it averages), and, if all labels are 0 or 1, what `topk`
            returns. What this keeps of each row in host memory, where scores are judged, `bytes_of`
            says. If it is false, the memory is constant, see `Streaming`.
        ks: how many places count in recall@k, NDCG@k and hit rate@k.
        model: what `score` asks, where it measures more of each row. Its own metrics are of these.

    Raises:
        UserError: when a batch has no labels, when scores and labels do not fit, when there are no
            rows, and for a k below 1.
    """
    return evaluate_labels(score, batches, [label], exact=exact, ks=ks, model=model)[0]


def evaluate_labels(
    score: Callable[[Batch], Tensor],
    batches: Iterable[Batch],
    labels: Sequence[int],
    *,
    exact: bool = True,
    world: World | None = None,
    ks: Sequence[int] = KS,
    model: BringsMeasures | None = None,
) -> list[dict[str, float]]:
    """Returns what `evaluate` returns for each of several labels; every batch is scored once.

    Of each label the rows count that have it.

    Args:
        score, batches: as for `evaluate`.
        labels: the numbers of the labels.
        exact: as for `evaluate`; it keeps 8 bytes a row for each further label.
        world: ranks that each score their share of the rows. All of them get the metrics of all
            rows.
        ks, model: as for `evaluate`.

    Raises:
        UserError: as `evaluate`.
    """
    topk_names(ks)  # a wrong k should not cost a pass over the rows
    judged = list(labels)
    measures = model.measures if model else ()
    streams = [Streaming(measures=measures) for _ in labels]
    columns = [ColumnBuffer() for _ in range(3)]
    sessions = ColumnBuffer()
    has_sessions = True
    world = world or World()
    with torch.no_grad():
        for batch in batches:
            scores, batch = score(batch).cpu(), batch.on_host.to("cpu")
            measures_BM = model.measure() if model and measures else None
            scores_BT, labels_BT = _judged(scores, batch, judged)
            for t, stream in enumerate(streams):
                labels_B, scores_B, known_B, known_BM = labelled(
                    labels_BT[:, t], scores_BT[:, t], batch.weights_B, measures_BM
                )
                stream.update(scores_B, labels_B, known_B, measures_BM=known_BM)
            if exact:
                weights_B = (
                    torch.ones_like(scores_BT[:, 0]) if batch.weights_B is None else batch.weights_B
                )
                for column, part in zip(columns, (scores_BT, labels_BT, weights_B), strict=True):
                    column.add(part)
                has_sessions = has_sessions and batch.session_B is not None
                if batch.session_B is not None:
                    sessions.add(batch.session_B)
    let_go()  # what scoring took is not what judging takes
    streams = merged(world, streams)
    results = [stream.result(with_unlogged=True) for stream in streams]
    if not any(result["examples"] for result in results):
        raise UserError("evaluate: no rows; give at least one batch that has some")
    if exact and not any(math.isnan(result["logloss"]) for result in results if result["examples"]):
        scores_NT, labels_NT, weights_of_all_N = (column.take() for column in columns)
        groups_N = sessions.take() if has_sessions else None
        # blocks of several columns lie side by side, so that what is freed of them fits nothing
        # larger
        let_go()
        for t, (stream, result) in enumerate(zip(streams, results, strict=True)):
            rows = labelled(labels_NT[:, t], scores_NT[:, t], weights_of_all_N, groups_N)
            result |= _exact_metrics(world, stream, rows, ks)
    return results


def _exact_metrics(
    world: World,
    stream: Streaming,
    rows: Sequence[Any],
    ks: Sequence[int],
) -> dict[str, float]:
    """Returns the metrics that need all rows of a label. rows: labels, scores, weights and sessions
    of this rank's.
    """
    labels_N, scores_N, weights_N, sessions_N = rows
    values = {}
    for name, metric in METRICS.items():
        if metric.exact:
            values[name] = metric.exact(world, stream, scores_N, labels_N, weights_N)
    if sessions_N is not None:
        from sparrow.metrics.groups import groups_across  # few logs have sessions

        values |= groups_across(world, stream, scores_N, labels_N, sessions_N, weights_N, ks)
    return values


def _judged(scores: Tensor, batch: Batch, labels: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Returns scores and labels of a batch, [B, T] of the labels that are judged.

    Raises:
        UserError: when it has no labels, or scores and labels do not fit.
    """
    if batch.labels_BT is None:
        raise UserError("evaluate: a batch has no labels; use a log with a label column")
    scores = scores if scores.dim() > 1 else scores[:, None]
    if scores.shape != batch.labels_BT.shape or max(labels) >= scores.shape[1]:
        shapes = f"{tuple(scores.shape)} scores for {tuple(batch.labels_BT.shape)} labels"
        raise UserError(f"evaluate: {shapes}; give one score per row and label")
    return scores[:, labels], batch.labels_BT[:, labels]
