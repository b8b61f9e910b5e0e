"""What a model's tables cost, and how a log's ids use them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparrow.core import Batch
from sparrow.core.config import Family
from sparrow.core.progress import Progress
from sparrow.data.batches.dataset import Dataset
from sparrow.embeddings import Component, EmbeddingTables, RowRecords
from sparrow.embeddings.sizes import state_bytes
from sparrow.extensions.tiers.frames import exact_frames
from sparrow.features.encodings import MISSING, kind_of
from sparrow.features.schema import Schema
from sparrow.trained.build import tables_of
from sparrow.trained.scorer import Restored

PIECE = 64 << 20  # bytes of rows that are in memory at a time


@dataclass(frozen=True, kw_only=True, eq=False)
class TableUse:
    """A table, the columns that look into it, lookups of each row [R], and the share of rows that
    never learnt.
    """

    component: Component
    columns: tuple[str, ...]
    hits_R: Tensor
    share_unlearnt: float

    @property
    def name(self) -> str:
        """The component's."""
        return self.component.name

    @property
    def bytes_weight(self) -> int:
        """Bytes of the values."""
        return self.component.bytes_values

    @property
    def bytes_state(self) -> int:
        """Bytes of the rest: see `state_bytes`, and what says which ids have which rows."""
        return state_bytes(self.component) + self.component.bytes_ids

    @property
    def stored(self) -> list[str]:
        """How rows are stored, in words: format, rounding, the rule's state, cache."""
        component = self.component
        cache = ""
        if component.cache.is_on:
            cache = f"{exact_frames(component, component.rows):,} frames, {component.cache.policy}"
        return [
            Family("sparrow.kernels.formats").name_of(component.format),
            component.format.rounding,
            component.state,
            cache,
        ]

    @property
    def share_never(self) -> float:
        """The share of the rows that no training row looked up."""
        return float((self.hits_R == 0).double().mean())

    def share_of_top(self, share: float) -> float:
        """Returns the share of the lookups that go to the most used rows, NaN without lookups.

        Args:
            share: how many of the rows count as most used, 0 to 1. At least one row does.
        """
        top = self.hits_R.topk(max(1, round(share * self.hits_R.numel()))).values
        total = int(self.hits_R.sum())
        return int(top.sum()) / total if total else float("nan")


@dataclass(kw_only=True)
class ColumnUse:
    """An id column in one part, counted: rows and ids, rows without a value, unknown ids, ids on
    untrained rows.
    """

    rows: int = 0
    ids: int = 0
    missing: int = 0
    unknown: int = 0
    untrained: int = 0


def count_usage(
    restored: Restored, dataset: Dataset, parts: tuple[str, ...], progress: Progress
) -> tuple[list[TableUse], dict[str, dict[str, ColumnUse]]]:
    """Read the training part and then the other parts. Returns tables, and column -> part -> how
    its ids fare.

    It needs 8 bytes of memory a row of the tables.

    Args:
        restored: the model.
        dataset: the prepared log.
        parts: the parts to read after training's.
        progress: is told how far it is.
    """
    schema = restored.schema
    modules = [tables for tables in tables_of(restored.model) if tables.features]
    records: dict[str, RowRecords] = {}
    table_of: dict[str, str] = {}
    for tables in modules:
        for spec in tables.specs:
            table_of |= {component.name: spec.name for component in spec.components}
        records |= {record.component.name: record for record in tables.all_records()}
    hits = {name: torch.zeros(record.rows, dtype=torch.int64) for name, record in records.items()}
    columns: dict[str, dict[str, ColumnUse]] = {name: {} for name in schema.sparse}
    for part in ("train", *parts) if modules else ():
        counted = 0
        total = dataset.rows(part)
        for batch in dataset.loader(1 << 14, split=part, dedup="off"):
            for tables in modules:
                _count(tables, batch.to(restored.run.device), schema, hits, columns, part)
            counted += batch.batch_size
            progress(f"counted {part}", counted, total)
    uses = []
    for name, record in records.items():
        reads = tuple(c for c in schema.sparse if schema.columns[c].table == table_of[name])
        unlearnt = _share_unlearnt(record)
        uses.append(
            TableUse(
                component=record.component,
                columns=reads,
                hits_R=hits[name],
                share_unlearnt=unlearnt,
            )
        )
    return uses, columns


def _count(
    tables: EmbeddingTables,
    batch: Batch,
    schema: Schema,
    hits: dict[str, Tensor],
    columns: dict[str, dict[str, ColumnUse]],
    part: str,
) -> None:
    ids = batch.ids
    for feature in tables.features:
        values_N = ids[feature.name].values_N
        rows = {name: rows_N.cpu() for name, rows_N in tables.rows_of(ids, feature.name).items()}
        unknown = kind_of(schema.encodings[feature.table]).unknown
        use = columns[feature.name].setdefault(part, ColumnUse())
        use.rows += batch.batch_size
        use.ids += len(values_N)
        use.missing += int((ids[feature.name].lengths_B == 0).sum())
        use.missing += int((values_N == MISSING).sum())
        use.unknown += 0 if unknown is None else int((values_N == unknown).sum())
        if part == "train":
            for name, rows_N in rows.items():
                known_N = rows_N[rows_N >= 0]
                hits[name].index_add_(0, known_N, torch.ones_like(known_N))
        else:  # an id of several components is untrained where a row of one is
            unseen = [(rows_N >= 0) & (hits[name][rows_N] == 0) for name, rows_N in rows.items()]
            use.untrained += int(torch.stack(unseen).any(0).sum())


def _share_unlearnt(record: RowRecords) -> float:
    """Returns the share of the rows that no update changed, in the rows and in the frames of a
    cache.
    """
    if (frames := record.store.exact_rows()) is None:
        chunks = record.chunks(PIECE)
        unlearnt = sum(int((chunk.fields["touched"] == 0).sum()) for chunk in chunks)
        return unlearnt / max(record.rows, 1)
    touched_R = record.fields["touched"].clone()
    touched_R[frames["row"].long()] |= frames["touched"]
    return float((touched_R == 0).double().mean())
