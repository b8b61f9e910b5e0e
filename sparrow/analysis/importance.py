"""Which features a model leans on: permutation importance."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sparrow.core import Batch, KeyedJagged
from sparrow.core.progress import Progress
from sparrow.features.schema import Schema
from sparrow.metrics import auc, labelled, ne


@dataclass(frozen=True, kw_only=True)
class Importance:
    """How much worse a model gets without a column: the rise of NE and the fall of AUC, as means
    over the repeats.

    ne_spread, auc_spread: their standard deviations over the repeats, NaN for a single one.
    """

    column: str
    ne: float
    auc: float
    ne_spread: float
    auc_spread: float


def measure_importance(
    score: Callable[[Batch], Tensor],
    rows: Batch,
    schema: Schema,
    *,
    batch_size: int,
    label: int = 0,
    repeats: int = 3,
    seed: int = 0,
    progress: Progress = lambda *_: None,
) -> list[Importance]:
    """Shuffle one column's values across the rows, score again, and measure the loss.

    Returns the importance of each column, the largest rise of NE first. A list moves as a whole.
    Features that were made from one column of the raw log move together. Labels, weights and all
    other columns stay, so each repeat has the columns' own distributions. Source: Breiman 2001,
    Random forests, section 10; Fisher et al. 2019 (model reliance).

    Args:
        score: Batch -> probabilities [B, T].
        rows: the rows to shuffle, with labels.
        schema: of the log.
        batch_size: rows per forward.
        label: the number of the label that is judged.
        repeats: how often each column is shuffled.
        seed: of the shuffles.
        progress: is told how far it is.
    """
    columns: dict[str, list[str]] = {}
    for name in schema.dense + schema.sparse:
        columns.setdefault(schema.columns[name].source or name, []).append(name)
    random = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(rows.batch_size, generator=random) for _ in range(repeats)]
    assert rows.labels_BT is not None
    labels_B = rows.labels_BT[:, label]

    def measure(*moved: Any) -> tuple[float, float]:
        """Returns NE and AUC of rows as `_batches` makes them."""
        batches = _batches(rows, schema, batch_size, *moved)
        scores = torch.cat([score(batch).cpu() for batch in batches])
        labels_N, scores_N, weights_N = labelled(
            labels_B, scores.view(len(scores), -1)[:, label], rows.weights_B
        )
        return ne(scores_N, labels_N, weights_N), auc(scores_N, labels_N, weights_N)

    base_ne, base_auc = measure()
    importances = []
    for number, (column, features) in enumerate(columns.items()):
        progress("importance", number, len(columns))
        moved = [measure(order_N, features) for order_N in orders]
        changes = [(moved_ne - base_ne, base_auc - moved_auc) for moved_ne, moved_auc in moved]
        ne_R, auc_R = torch.tensor(changes, dtype=torch.float64).unbind(1)
        ne_spread = auc_spread = math.nan
        if repeats > 1:
            ne_spread = float(ne_R.std())
            auc_spread = float(auc_R.std())
        importances.append(
            Importance(
                column=column,
                ne=float(ne_R.mean()),
                auc=float(auc_R.mean()),
                ne_spread=ne_spread,
                auc_spread=auc_spread,
            )
        )
    return sorted(importances, key=lambda importance: -importance.ne)


def _batches(
    rows: Batch,
    schema: Schema,
    batch_size: int,
    order_N: Tensor | None = None,
    moved: Collection[str] = (),
) -> Iterator[Batch]:
    """Yields the rows in order. Row i has the `moved` features of row order_N[i]."""
    ids = rows.ids.expanded()
    for rows_B in torch.arange(rows.batch_size).split(batch_size):
        source_B = rows_B if order_N is None else order_N[rows_B]
        dense_BC = rows.dense_BC[rows_B]
        for name, place in schema.places.items():
            if name in moved:
                dense_BC[:, place] = rows.dense_BC[source_B, place]
        parts = [
            replace(ids[key], inverse_B=source_B if key in moved else rows_B).expanded()
            for key in ids.keys
        ]
        none = (torch.empty(0, dtype=torch.int64),)
        weights = [part.weights_N for part in parts if part.weights_N is not None]
        yield Batch(
            dense_BC=dense_BC,
            ids=KeyedJagged(
                keys=ids.keys,
                values_N=torch.cat([part.values_N for part in parts] or none),
                lengths=torch.cat([part.lengths_B for part in parts] or none),
                weights_N=torch.cat(weights) if weights else None,
            ),
            labels_BT=None if rows.labels_BT is None else rows.labels_BT[rows_B],
            weights_B=None if rows.weights_B is None else rows.weights_B[rows_B],
        )
