"""Where rows are kept: a store is a file.

A cache of exact rows stands over rows in memory or on an SSD. Rows on an SSD have frames in memory, and those in the
memory of a host, or on an SSD beneath it, have frames on a device.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace

from sparrow.core import UserError
from sparrow.embeddings.spec import Component, Folder, in_memory
from sparrow.embeddings.stores.cached import CachedStore, ssd_of
from sparrow.embeddings.stores.flights import Flights
from sparrow.embeddings.stores.host import HostStore
from sparrow.embeddings.stores.mapped import LeveledRows, MappedStore
from sparrow.embeddings.stores.memory import MemoryStore
from sparrow.embeddings.stores.saved import Saved, SavedStore
from sparrow.embeddings.stores.ssd import SsdStore, made_folder
from sparrow.embeddings.stores.store import (
    At,
    Beneath,
    MakeStore,
    RowStore,
    chosen_device,
    chosen_folder,
    chosen_store,
    on_ssd,
    rows_on,
    stored_in,
)


def new_store(component: Component, rows: int, dim: int) -> RowStore:
    """Returns a store of the kind that `stored_in` chose; by default where its component says, with its cache.

    Args:
        component: whose rows it holds.
        rows: how many of its rows.
        dim: how many of its dimensions.

    Raises:
        UserError: when its rows cannot be where its tier says.
    """
    if make := chosen_store():
        return make(component, rows, dim)
    tier, folder = component.tier if rows else in_memory(), chosen_folder() or Folder()
    why = tier.reason_against(chosen_device())
    if tier.is_on and component.policy is not None:
        why = why or "its ids come and go; choose another addressing, or leave it in memory"
    if tier.has_folder and folder.path is None:
        why = why or "no folder is named; make the tables within `on_ssd`"
    if why:
        raise UserError(f"table {component.name!r}: tables.tier is {tier.name}, and {why}")
    if tier.has_folder and folder.path:
        folder = replace(folder, path=made_folder(folder.path))
    beneath: Beneath = tier.store(component, rows, dim, folder)
    return CachedStore(component, rows, dim, beneath) if component.cache.is_on and rows else beneath


def unallocated() -> AbstractContextManager[None]:
    """Tables that are made within this context have no memory. Who shards a model puts parts in their place."""
    return stored_in(lambda component, rows, dim: MemoryStore(component, rows, dim, "meta"))


__all__ = [
    "At",
    "Beneath",
    "CachedStore",
    "Flights",
    "Folder",
    "HostStore",
    "LeveledRows",
    "MakeStore",
    "MappedStore",
    "MemoryStore",
    "RowStore",
    "Saved",
    "SavedStore",
    "SsdStore",
    "new_store",
    "on_ssd",
    "rows_on",
    "ssd_of",
    "stored_in",
    "unallocated",
]
