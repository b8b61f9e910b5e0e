"""Which features a model leans on: permutation importance."""

from __future__ import annotations

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
    """How much worse a model gets without a column: the rise of NE and the fall of AUC, as means over the repeats.

    ne_spread, auc_spread: their standard deviations over the repeats, NaN for a single one.
    """

    column: str
    ne: float
    auc: float
    ne_spread: float
    auc_spread: float


def importance(
    score: Callable[[Batch], Tensor],
    whole: Batch,
    schema: Schema,
    *,
    batch_size: int,
    label: int = 0,
    repeats: int = 3,
    seed: int = 0,
    told: Progress = lambda what, done, total: None,
) -> list[Importance]:
    """Shuffle one column's values across the rows, score again, and measure the loss.

    Returns the importance of each column, the largest rise of NE first. A list moves as a whole. Features that were
    made from one column of the raw log move together. Labels, weights and all other columns stay, so each repeat has
    the columns' own distributions. Source: Breiman 2001, Random forests, section 10; Fisher et al. 2019 (model
    reliance).

    Args:
        score: Batch -> probabilities [B, T].
        whole: the rows to shuffle, with labels.
        schema: of the log.
        batch_size: rows per forward.
        label: the number of the label that is judged.
        repeats: how often each column is shuffled.
        seed: of the shuffles.
        told: is told how far it is.
    """
    columns: dict[str, list[str]] = {}
    for name in schema.dense + schema.sparse:
        columns.setdefault(schema.columns[name].source or name, []).append(name)
    random = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(whole.batch_size, generator=random) for _ in range(repeats)]
    assert whole.labels_BT is not None
    labels_B = whole.labels_BT[:, label]

    def judged(*moved: Any) -> tuple[float, float]:
        """Returns NE and AUC of rows as `_batches` makes them."""
        scores = torch.cat([score(batch).cpu() for batch in _batches(whole, schema, batch_size, *moved)])
        labels_N, scores_N, weights_N = labelled(labels_B, scores.view(len(scores), -1)[:, label], whole.weights_B)
        return ne(scores_N, labels_N, weights_N), auc(scores_N, labels_N, weights_N)

    base = judged()
    found = []
    for done, (column, features) in enumerate(columns.items()):
        told("importance", done, len(columns))
        worse = [judged(order_N, features) for order_N in orders]
        changes = [(found_ne - base[0], base[1] - found_auc) for found_ne, found_auc in worse]
        ne_R, auc_R = torch.tensor(changes, dtype=torch.float64).unbind(1)
        spreads = [float(values.std()) if repeats > 1 else float("nan") for values in (ne_R, auc_R)]
        found.append(
            Importance(
                column=column,
                ne=float(ne_R.mean()),
                auc=float(auc_R.mean()),
                ne_spread=spreads[0],
                auc_spread=spreads[1],
            )
        )
    return sorted(found, key=lambda one: -one.ne)


def _batches(
    whole: Batch, schema: Schema, batch_size: int, order_N: Tensor | None = None, moved: Collection[str] = ()
) -> Iterator[Batch]:
    """Yields the rows in order. Row i has the `moved` features of row order_N[i]."""
    ids = whole.ids.expanded()
    for rows_B in torch.arange(whole.batch_size).split(batch_size):
        others_B = rows_B if order_N is None else order_N[rows_B]
        dense_BC = whole.dense_BC[rows_B]
        for name, place in schema.places.items():
            if name in moved:
                dense_BC[:, place] = whole.dense_BC[others_B, place]
        parts = [replace(ids[key], inverse_B=others_B if key in moved else rows_B).expanded() for key in ids.keys]
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
            labels_BT=None if whole.labels_BT is None else whole.labels_BT[rows_B],
            weights_B=None if whole.weights_B is None else whole.weights_B[rows_B],
        )
