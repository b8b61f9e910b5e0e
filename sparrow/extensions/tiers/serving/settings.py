"""Which tables of a model are read from an SSD, and how much of them is kept in memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal
from urllib.parse import quote

from torch import Tensor

from sparrow.core.config import flag
from sparrow.core.errors import UserError, require, suggest
from sparrow.embeddings import EmbeddingTables
from sparrow.embeddings.spec import Component
from sparrow.embeddings.stores.mapped import LeveledRows
from sparrow.extensions.tiers.folders import make_folder
from sparrow.extensions.tiers.serving.blocks import open_blocks
from sparrow.extensions.tiers.serving.lookup import OnSsd
from sparrow.extensions.tiers.serving.pooled import PooledVectors
from sparrow.extensions.tiers.serving.rows import CachedRows
from sparrow.kernels.block_io import Layout, Way
from sparrow.kernels.formats import fp32

MB = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Ssd:
    """Tables that are read from an SSD. It changes speed and memory, never scores, unless
    `pooled_order` is "any".

    Args:
        folder: a folder on an SSD. Large tables are written there as blocks, once, and their rows
            are read from there.
        cache_mb: of rows of `folder` in memory, for all workers together, each table in proportion
            to its bytes.
        least_mb: smaller tables stay in memory.
        decoded: write rows in fp32, whatever their format is: less work for each read, more room in
            both places.
        in_memory: tables that stay in memory, as those of candidates should.
        pooled_mb: of vectors of whole lists of `folder` in memory, for all workers together. 0
            keeps none.
        pooled_length: lists with fewer ids have no such vector.
        pooled_order: "any" takes the vector of a list for one with the same ids and weights in
            another order, whose sum may differ in the last bit.
        way: how blocks are read, see `block_io`.
        shared: a folder in memory, such as one under /dev/shm, for caches that all processes share
            who give it; None for caches of a process alone.

    Raises:
        UserError: for a number that is out of range.
    """

    folder: Path = field(metadata=flag("ssd"))
    cache_mb: float = field(default=1024.0, metadata=flag("ssd_cache_mb"))
    least_mb: float = field(default=64.0, metadata=flag("ssd_least_mb"))
    decoded: bool = field(default=False, metadata=flag("ssd_decoded"))
    in_memory: tuple[str, ...] = ()
    pooled_mb: float = 0.0
    pooled_length: int = 32
    pooled_order: Literal["exact", "any"] = "exact"
    way: Way = field(default="auto", metadata=flag(None))
    shared: Path | None = field(default=None, metadata=flag(None))

    def __post_init__(self) -> None:
        require(least=0, cache_mb=self.cache_mb, least_mb=self.least_mb, pooled_mb=self.pooled_mb)
        require(least=1, pooled_length=self.pooled_length)

    def put(
        self,
        tables: Sequence[EmbeddingTables],
        rows: Callable[[Component], tuple[str, LeveledRows]],
        hot: Mapping[str, Tensor],
        before: Sequence[OnSsd] = (),
    ) -> tuple[OnSsd, ...]:
        """Have some tables of a model read from an SSD.

        Args:
            tables: all of the model.
            rows: gives the rows of a component, and what tells them from others.
            hot: component -> rows with which its cache begins, see `hot_rows`.
            before: those of a model that still answers. A table with the same rows below a delta
                shares their cache.

        Raises:
            UserError: when there can be no such folder, rows cannot be written as blocks, or blocks
                are damaged.
            UnreadableError: when hot rows cannot be read.
        """
        return _put_on_ssd(tables, rows, self, hot, before)

    def divided(self, workers: int) -> Ssd:
        """Returns the part of one of so many processes. Caches that they share are not divided."""
        cache_mb = self.cache_mb if self.shared else self.cache_mb / workers
        return replace(self, cache_mb=cache_mb, pooled_mb=self.pooled_mb / workers)

    def chosen(self, bytes_of: dict[str, int]) -> list[str]:
        """Returns the components whose rows are on the SSD.

        Args:
            bytes_of: component -> the bytes of its rows, for all that can be there.

        Raises:
            UserError: when no table has a name in `in_memory`.
        """
        for name in self.in_memory:
            if not any(_is_part(component, name) for component in bytes_of):
                known = {component.split(".")[0] for component in bytes_of}
                raise UserError(f"in_memory: no table {name!r}{suggest(name, known)}")
        return [
            component
            for component, size in bytes_of.items()
            if size >= self.least_mb * MB
            and not any(_is_part(component, name) for name in self.in_memory)
        ]


def _is_part(component: str, table: str) -> bool:
    """Whether a component is a table, or one of its parts, which are named TABLE.PART."""
    return component == table or component.startswith(f"{table}.")


def _put_on_ssd(
    tables: Sequence[EmbeddingTables],
    rows: Callable[[Component], tuple[str, LeveledRows]],
    ssd: Ssd,
    hot: Mapping[str, Tensor],
    before: Sequence[OnSsd],
) -> tuple[OnSsd, ...]:
    if not os.path.isdir(ssd.folder):  # else it is read, and may be another user's
        make_folder(ssd.folder)
    parts: list[tuple[EmbeddingTables, int, Component]] = []
    for table in tables:
        for number, record in enumerate(table.all_records()):
            parts.append((table, number, record.component))
    # others are read into memory anyway
    leveled = {c.name: rows(c)[1] for _, _, c in parts if c.policy is None}
    formats = {c.name: fp32.Config() if ssd.decoded else c.format for _, _, c in parts}
    layouts = {
        c.name: Layout(fields=formats[c.name].fields(c.dim), rows=leveled[c.name].below)
        for _, _, c in parts
        if c.name in leveled
    }
    sizes = {name: layout.rows * layout.record_bytes for name, layout in layouts.items()}
    chosen = ssd.chosen(sizes)
    total = sum(sizes[name] for name in chosen)
    shared: dict[Path, CachedRows] = {}
    for lookup in before:
        shared |= {cached.place: cached for cached in lookup.cached.values()}
    holders = len({id(table) for table, _, component in parts if component.name in chosen})
    lookups = []
    for table in tables:
        cached: dict[int, CachedRows] = {}
        decoded: set[int] = set()
        for _, number, component in (part for part in parts if part[0] is table):
            if (name := component.name) not in chosen:
                continue
            is_decoded = component.format != formats[name]
            suffix = "-fp32" if is_decoded else ""
            place = ssd.folder / f"{quote(name, safe='')}-{rows(component)[0][:32]}{suffix}"
            if place not in shared:
                convert = partial(_decoded, component) if is_decoded else None
                fields = leveled[name].fields
                blocks = open_blocks(place, layouts[name], name, fields, ssd.way, convert)
                bytes = int(ssd.cache_mb * MB * sizes[name] / total)
                shared[place] = CachedRows(blocks, name, place, bytes, ssd.shared)
                if name in hot:
                    shared[place].warm(hot[name])
            cached[number] = shared[place]
            if is_decoded:
                decoded.add(number)
        if cached:
            pooled = None
            if ssd.pooled_mb > 0:
                bytes = int(ssd.pooled_mb * MB / holders)
                pooled = PooledVectors(bytes, ssd.pooled_length, ssd.pooled_order == "any")
            lookups.append(OnSsd(table.exchange.parts[0], cached, pooled, decoded))
    return tuple(lookups)


def _decoded(component: Component, fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {"weight": component.format.decode(fields, component.dim)}
