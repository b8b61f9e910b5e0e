"""The rows of a model's tables that are used most, for caches that would begin empty."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from sparrow.core import Batch
from sparrow.embeddings import EmbeddingTables

# in a model folder: component -> int64, its rows, the one that is used most first
FILE = "hot.safetensors"
_TOGETHER = 16  # batches whose rows are counted together


def hot_rows(
    tables: Sequence[EmbeddingTables], batches: Iterable[Batch], most: int
) -> dict[str, Tensor]:
    """Returns component -> its rows that are used most, int64, the most used first, then by their
    number.

    A row counts once for each id that uses it. Tables whose ids come and go have none: their rows
    are always read.

    Args:
        tables: all of a model.
        batches: of a log.
        most: how many rows of a component.
    """
    used: dict[str, list[Tensor]] = {}
    counts: dict[str, tuple[Tensor, Tensor]] = {}
    for number, batch in enumerate(batches, 1):
        for table in tables:
            dynamic = {
                record.component.name for record in table.all_records() if record.component.policy
            }
            for feature in table.features:
                for name, rows_N in table.rows_of(batch.ids, feature.name).items():
                    if name not in dynamic:
                        used.setdefault(name, []).append(rows_N[rows_N >= 0])
        if number % _TOGETHER == 0:
            _count(used, counts)
    _count(used, counts)
    return {
        name: rows_U[count_U.argsort(descending=True, stable=True)[:most]]
        for name, (rows_U, count_U) in counts.items()
    }


def _count(used: dict[str, list[Tensor]], counts: dict[str, tuple[Tensor, Tensor]]) -> None:
    """Add what was used to the counts, and forget it."""
    none = torch.zeros(0, dtype=torch.int64)
    for name, rows in used.items():
        rows_U, count_U = torch.cat(rows).unique(return_counts=True)
        old_U, old_count_U = counts.get(name, (none, none))
        union_U, place_N = torch.cat([old_U, rows_U]).unique(return_inverse=True)
        counts[name] = (
            union_U,
            torch.zeros_like(union_U).scatter_add_(0, place_N, torch.cat([old_count_U, count_U])),
        )
    used.clear()
