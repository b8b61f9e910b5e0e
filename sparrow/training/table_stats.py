"""What a run says about its tables: their bytes, and which rows it could not take as they were."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from typing_extensions import override

from sparrow.checkpoint import Checkpoint
from sparrow.distributed import World
from sparrow.embeddings import EmbeddingTables
from sparrow.embeddings.sizes import all_bytes, disk_bytes
from sparrow.training.callbacks import Callback


class TableStats(Callback):
    """The tables of all ranks.

    Args:
        world: the ranks.
        tables: the model's.
        say: is told of exact rows that were loaded and found no frame.
        is_warm: whether a new run begins with rows of another one.
    """

    def __init__(
        self,
        world: World,
        tables: Sequence[EmbeddingTables],
        say: Callable[[str], None],
        is_warm: bool,
    ) -> None:
        self._world = world
        self._say = say
        self._is_warm = is_warm
        self._records = list(chain.from_iterable(part.all_records() for part in tables))
        specs = chain.from_iterable(part.specs for part in tables)
        components = chain.from_iterable(spec.components for spec in specs)
        self._names = [c.name for c in components]  # the same on all ranks, in one order

    @override
    def begin(self) -> None:
        if self._is_warm:
            self._say_rounded()

    @override
    def load(self, saved: Checkpoint) -> None:
        self._say_rounded()

    @override
    def results(self) -> dict[str, Any]:
        """Returns the bytes of all tables, and how many of them are of rows on a disk, where there
        are such.

        hit_rate is of each cache, and empty without one.
        """
        parts = [(record.component, record.rows, record.dim) for record in self._records]
        local_size = sum(all_bytes(*part) for part in parts)
        local_disk = sum(disk_bytes(*part) for part in parts)
        sizes = torch.tensor([local_size, local_disk])
        size, disk = self._world.all_sum("bytes of tables", sizes).tolist()
        on_disk = {"bytes_disk": disk} if disk else {}
        return {"tables": {"bytes": size, **on_disk, "hit_rate": {}}}

    def _say_rounded(self) -> None:
        """Tells which rows of loaded caches found no frame, if any."""
        count_C = torch.zeros(len(self._names), dtype=torch.int64)
        for record in self._records:
            count_C[self._names.index(record.component.name)] += record.rounded
        counts = self._world.all_sum("rows without a frame", count_C).tolist()
        tables = [
            f"{count:,} of table {name!r}"
            for name, count in zip(self._names, counts, strict=True)
            if count
        ]
        if tables:
            self._say(
                "rows of caches that found no frame here are stored as other rows:"
                f" {', '.join(tables)}"
            )
