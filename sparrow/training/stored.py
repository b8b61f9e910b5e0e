"""What a run says about its tables: their bytes, how often rows were in their caches, and ids that came and went."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sparrow.checkpoint import Checkpoint
from sparrow.distributed import World
from sparrow.embeddings import EmbeddingTables
from sparrow.embeddings.stores import CachedStore, ssd_of
from sparrow.training.turnover import Turnover


class Stored:
    """The tables of all ranks. Of a training batch, each different row of a cached table counts once.

    Args:
        world: the ranks.
        tables: the model's.
    """

    def __init__(self, world: World, tables: Sequence[EmbeddingTables]) -> None:
        self._world = world
        self._turnover = Turnover(world, tables)
        self._records = [record for of_features in tables for record in of_features.all_records()]
        components = [c for of_features in tables for spec in of_features.specs for c in spec.components]
        self._names = [c.name for c in components]  # the same on all ranks, in one order
        self._cached = [c for c in components if c.cache.is_on]
        self._on_ssd = [c.name for c in components if c.tier.is_on and c.tier.has_folder]
        self._judged = False
        numbers = {c.name: number for number, c in enumerate(self._cached)}
        self._stores = [(numbers[r.component.name], r.store) for r in self._records if isinstance(r.store, CachedStore)]
        self._before_C2 = torch.zeros(len(self._cached), 2, dtype=torch.int64)  # hits and rows of the run so far
        self._line_C2 = self._before_C2.clone()  # and at the last line of the run log

    def line(self) -> dict[str, float]:
        """Returns the hit rate of all caches together since the last such line, and what `Turnover.line` does."""
        if not self._cached:
            return self._turnover.line()
        counts_C2 = self._counts()
        hits, rows = (counts_C2 - self._line_C2).sum(0).tolist()
        self._line_C2 = counts_C2
        return ({"hit_rate": hits / rows} if rows else {}) | self._turnover.line()

    def crowded(self) -> list[str]:
        """Returns a line, once, for each cache with fewer frames than its protected batches have rows.

        It also returns what `Turnover.crowded` does.
        """
        if self._judged or not self._cached:
            return self._turnover.crowded()
        self._judged = True
        counts_C2 = torch.zeros_like(self._before_C2)  # frames, different rows of a batch
        for number, store in self._stores:
            counts_C2[number] += torch.tensor([len(store.frame("tag")), store.most])
        self._world.all_sum("rows and frames", counts_C2)
        return [
            f"table {one.name!r}: its cache has {frames:,} frames, and {one.cache.protect} batches may use "
            f"{most * one.cache.protect:,} rows, so that many find none; raise tables.cache.fraction, or lower "
            "tables.cache.protect or data.batch_size"
            for one, (frames, most) in zip(self._cached, counts_C2.tolist(), strict=True)
            if frames < min(most * one.cache.protect, one.rows)
        ] + self._turnover.crowded()

    def results(self) -> dict[str, Any]:
        """Returns the bytes of all tables, the hit rate of each cache over the whole run, and `Turnover.results`.

        Of tables on an SSD, be it beneath the host's memory, there is what was read and written since this process
        began, see `SsdStore.counters`. Frames that are counted are those of the first tier.
        """
        mine = sum(record.nbytes for record in self._records)
        size = int(self._world.all_sum("bytes of tables", torch.tensor([mine])))
        counts = zip(self._cached, self._counts().tolist(), strict=True)
        rates = {one.name: hits / rows for one, (hits, rows) in counts if rows}
        found = {"bytes": size, "hit_rate": rates, "ids": self._turnover.results()}
        return found | ({"ssd": self._moved()} if self._on_ssd else {})

    def _moved(self) -> dict[str, dict[str, int]]:
        """Returns the counters of each table on an SSD, of all ranks together."""
        names = ("hits", "used", "left", "bytes_read", "bytes_written")
        counts_TN = torch.zeros(len(self._on_ssd), len(names), dtype=torch.int64)
        for record in self._records:
            if record.component.name in self._on_ssd and (store := ssd_of(record.store)):
                counts_TN[self._on_ssd.index(record.component.name)] += torch.tensor([store.counters[n] for n in names])
        total = self._world.all_sum("what an SSD did", counts_TN).tolist()
        return {table: dict(zip(names, of, strict=True)) for table, of in zip(self._on_ssd, total, strict=True)}

    def rounded(self) -> str:
        """Returns which rows of loaded caches found no frame, for a person; "" if none."""
        count_C = torch.zeros(len(self._names), dtype=torch.int64)
        for record in self._records:
            count_C[self._names.index(record.component.name)] += record.rounded
        counts = self._world.all_sum("rows without a frame", count_C).tolist()
        told = [f"{count:,} of table {name!r}" for name, count in zip(self._names, counts, strict=True) if count]
        return f"rows of caches that found no frame here are stored as other rows: {', '.join(told)}" if told else ""

    def state(self) -> dict[str, Tensor]:
        """Returns the counts, for a checkpoint."""
        mine = {"hits": self._counts(), "hits at the last line": self._line_C2} if self._cached else {}
        return mine | self._turnover.state()

    def load(self, saved: Checkpoint) -> None:
        """Continue from a checkpoint."""
        self._turnover.load(saved)
        if self._cached:
            state = saved.part("progressive")
            self._before_C2, self._line_C2 = state["hits"], state["hits at the last line"]

    def _counts(self) -> Tensor:
        """Returns hits and rows of each cache on all ranks: int64 [C, 2]."""
        mine_C2 = torch.zeros_like(self._before_C2)
        for number, store in self._stores:
            mine_C2[number] += torch.tensor([store.hits, store.used])
        return self._before_C2 + self._world.all_sum("hits of caches", mine_C2)
