"""The sizes of tables whose addressing depends on the log are settled, from how often each id
occurs in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from sparrow.data.batches.dataset import Dataset
from sparrow.embeddings import LogTable, Numbering, TableChoices
from sparrow.embeddings.settled import settle
from sparrow.features.schema import Schema
from sparrow.trained.run import Run


def with_sizes(
    run: Run,
    dataset: Dataset,
    dims: Mapping[str, int],
    before: tuple[Run, Schema] | None,
    say: Callable[[str], None],
) -> TableChoices:
    """Returns the choices of tables with the sizes of their addressings settled.

    Args:
        run: its settings.
        dataset: the prepared log.
        dims: table -> D of its vectors, for tables that features look into.
        before: the run that it goes on with, and the schema of its log.
        say: is told what takes long.
    """
    ids = {name: Numbering.of(table) for name, table in dataset.schema.encodings.items()}
    counts = Counts(dataset, say)
    tables = {
        name: LogTable(ids[name], dims[name], partial(counts, name)) for name in ids if name in dims
    }
    if before is None:
        return settle(run.tables, tables, run.tables, {})
    ids_before = {name: Numbering.of(table) for name, table in before[1].encodings.items()}
    return settle(run.tables, tables, before[0].tables, ids_before)


class Counts:
    """How often the training part of a log has each id. It is read when somebody asks first."""

    def __init__(self, dataset: Dataset, say: Callable[[str], None] = lambda text: None) -> None:
        self._dataset = dataset
        self._say = say
        self._counts: dict[str, Tensor] = {}

    def __call__(self, table: str) -> Tensor:
        """Returns how often training rows have each id of a table, see `LogTable`."""
        if not self._counts:
            self._count()
        return self._counts[table]

    def _count(self) -> None:
        schema = self._dataset.schema
        self._say("tables.addressing: counting the ids of the training part, which settles sizes")
        for name, table in schema.encodings.items():
            self._counts[name] = torch.zeros(
                (table.rows or 0) if table.is_numbered else 1, dtype=torch.int64
            )
        for batch in self._dataset.loader(1 << 14, split="train", dedup="off"):
            for feature in schema.sparse:
                values_N = batch.ids[feature].values_N.long()
                counts = self._counts[str(schema.columns[feature].table)]
                if len(counts) == 1:  # of a table whose ids have no numbers: one sum
                    values_N = values_N * 0
                counts += torch.bincount(values_N, minlength=len(counts))
