"""What a run says about its caches and tiers: how often rows were in frames, and what an SSD
did.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from sparrow.checkpoint import Checkpoint
from sparrow.distributed import World
from sparrow.embeddings import EmbeddingTables
from sparrow.extensions.tiers.stores.cached import CachedStore, ssd_of
from sparrow.training.callbacks import Callback


class Hits(Callback):
    """The tables of all ranks. Of a training batch, each different row of a cached table counts
    once.

    Args:
        world: the ranks.
        tables: the model's.
    """

    def __init__(self, world: World, tables: Sequence[EmbeddingTables]) -> None:
        self._world = world
        self._records = list(chain.from_iterable(features.all_records() for features in tables))
        components = list(chain.from_iterable(features.components for features in tables))
        # the same on all ranks, in one order
        self._cached = [c for c in components if c.cache.is_on]
        self._on_ssd = [c.name for c in components if c.tier.is_on and c.tier.has_folder]
        self._judged = False
        numbers = {c.name: number for number, c in enumerate(self._cached)}
        self._stores = [
            (numbers[r.component.name], r.store)
            for r in self._records
            if isinstance(r.store, CachedStore)
        ]
        # hits and rows of the run so far
        self._before_C2 = torch.zeros(len(self._cached), 2, dtype=torch.int64)
        self._line_C2 = self._before_C2.clone()  # and at the last line of the run log

    @override
    def log_line(self) -> dict[str, float]:
        """Returns the hit rate of all caches together since the last such line."""
        if not self._cached:
            return {}
        counts_C2 = self._counts()
        hits, rows = (counts_C2 - self._line_C2).sum(0).tolist()
        self._line_C2 = counts_C2
        return {"hit_rate": hits / rows} if rows else {}

    @override
    def notes(self) -> list[str]:
        """Returns a line, once, for each cache with fewer frames than its protected batches have
        rows.
        """
        if self._judged or not self._cached:
            return []
        self._judged = True
        counts_C2 = torch.zeros_like(self._before_C2)  # frames, different rows of a batch
        for number, store in self._stores:
            counts_C2[number] += torch.tensor([len(store.frame("tag")), store.most])
        self._world.all_sum("rows and frames", counts_C2)
        notes = []
        for component, (frames, most) in zip(self._cached, counts_C2.tolist(), strict=True):
            batches = component.cache.protect
            if frames < min(most * batches, component.rows):
                notes.append(
                    f"table {component.name!r}: its cache has {frames:,} frames, and {batches}"
                    f" batches may use {most * batches:,} rows, so that many find none; raise"
                    " tables.cache.fraction, or lower tables.cache.protect or data.batch_size"
                )
        return notes

    @override
    def results(self) -> dict[str, Any]:
        """Returns the hit rate of each cache over the whole run.

        Of tables on an SSD, be it beneath the host's memory, there is what was read and written
        since this process began, see `SsdStore.counters`. Frames that are counted are those of the
        first tier.
        """
        counts = zip(self._cached, self._counts().tolist(), strict=True)
        rates = {component.name: hits / rows for component, (hits, rows) in counts if rows}
        moved = {"ssd": self._moved()} if self._on_ssd else {}
        return {"tables": {"hit_rate": rates, **moved}}

    def _moved(self) -> dict[str, dict[str, int]]:
        """Returns the counters of each table on an SSD, of all ranks together."""
        names = ("hits", "used", "left", "bytes_read", "bytes_written")
        counts_TN = torch.zeros(len(self._on_ssd), len(names), dtype=torch.int64)
        for record in self._records:
            if record.component.name in self._on_ssd and (store := ssd_of(record.store)):
                counts_TN[self._on_ssd.index(record.component.name)] += torch.tensor(
                    [store.counters[n] for n in names]
                )
        total = self._world.all_sum("what an SSD did", counts_TN).tolist()
        return {
            table: dict(zip(names, table_counts, strict=True))
            for table, table_counts in zip(self._on_ssd, total, strict=True)
        }

    @override
    def state_dict(self) -> dict[str, Tensor]:
        """Returns the counts."""
        return (
            {"hits": self._counts(), "hits at the last line": self._line_C2} if self._cached else {}
        )

    @override
    def load(self, saved: Checkpoint) -> None:
        """Continue from a checkpoint."""
        if self._cached:
            state = saved.part("progressive")
            self._before_C2 = state["hits"]
            self._line_C2 = state["hits at the last line"]

    def _counts(self) -> Tensor:
        """Returns hits and rows of each cache on all ranks: int64 [C, 2]."""
        counts_C2 = torch.zeros_like(self._before_C2)
        for number, store in self._stores:
            counts_C2[number] += torch.tensor([store.hits, store.used])
        return self._before_C2 + self._world.all_sum("hits of caches", counts_C2)
