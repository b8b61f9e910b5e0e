"""Where rows are kept: a store is a file. A cache of exact rows stands over one whose slots are rows."""

from __future__ import annotations

from contextlib import AbstractContextManager

from sparrow.embeddings.spec import Component
from sparrow.embeddings.tiers.cached import CachedStore
from sparrow.embeddings.tiers.mapped import LeveledRows, MappedStore
from sparrow.embeddings.tiers.memory import MemoryStore
from sparrow.embeddings.tiers.store import At, MakeStore, RowStore, chosen_store, rows_on, stored_in


def new_store(component: Component, rows: int, dim: int) -> RowStore:
    """Returns a store of the kind that `stored_in` chose; by default in memory, with a cache if the component has one.

    Args:
        component: whose rows it holds.
        rows: how many of its rows.
        dim: how many of its dimensions.
    """
    if make := chosen_store():
        return make(component, rows, dim)
    beneath = MemoryStore(component, rows, dim)
    return CachedStore(component, rows, dim, beneath) if component.cache.is_on else beneath


def unallocated() -> AbstractContextManager[None]:
    """Tables that are made within this context have no memory. Who shards a model puts parts in their place."""
    return stored_in(lambda component, rows, dim: MemoryStore(component, rows, dim, "meta"))


__all__ = [
    "At",
    "CachedStore",
    "LeveledRows",
    "MakeStore",
    "MappedStore",
    "MemoryStore",
    "RowStore",
    "new_store",
    "rows_on",
    "stored_in",
    "unallocated",
]
