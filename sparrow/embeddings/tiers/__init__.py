"""Where rows are kept: a store is a file.

A cache of exact rows stands over rows in memory or on an SSD. Rows on an SSD have frames in memory, and those in the
memory of a host, or on an SSD beneath it, have frames on a device.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace

from sparrow.core import UserError
from sparrow.embeddings.spec import Component
from sparrow.embeddings.tiers.cached import CachedStore, ssd_of
from sparrow.embeddings.tiers.flights import Flights
from sparrow.embeddings.tiers.host import HostStore
from sparrow.embeddings.tiers.mapped import LeveledRows, MappedStore
from sparrow.embeddings.tiers.memory import MemoryStore
from sparrow.embeddings.tiers.saved import Saved, SavedStore
from sparrow.embeddings.tiers.ssd import SsdStore, check, made_folder
from sparrow.embeddings.tiers.store import (
    At,
    Beneath,
    Folder,
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
        UserError: when it is to be on an SSD, or beneath frames of a device, and cannot.
    """
    if make := chosen_store():
        return make(component, rows, dim)
    beneath: Beneath
    folder = chosen_folder() or Folder()
    if not (component.tier.is_on and rows):
        beneath = MemoryStore(component, rows, dim)
    else:
        check(component, chosen_device())
        if component.tier.has_ssd:
            if folder.path is None:
                told = "tables.tier is ssd, and no folder is named; make the tables within `on_ssd`"
                raise UserError(f"table {component.name!r}: {told}")
            folder = replace(folder, path=made_folder(folder.path))
        kind = HostStore if component.tier.name == "host" else SsdStore
        beneath = kind(component, rows, dim, folder)
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
