"""Where rows are kept: a store is a file. Those of tiers beyond plain memory stand in
`sparrow.extensions.tiers`.
"""

from __future__ import annotations

from typing import cast

from sparrow.core import UserError
from sparrow.embeddings.spec import Component, Placement, in_memory
from sparrow.embeddings.stores.memory import MemoryStore
from sparrow.embeddings.stores.store import At, Beneath, External, InTransit, RowStore


def new_store(component: Component, rows: int, dim: int, placement: Placement) -> RowStore:
    """Returns a store where a component's tier says, with its cache, unless the placement has
    another.

    Args:
        component: whose rows it holds.
        rows: how many of its rows.
        dim: how many of its dimensions.
        placement: see there.

    Raises:
        UserError: when its rows cannot be where its tier says.
    """
    if placement.store is not None:
        return cast(RowStore, placement.store(component, rows, dim))
    tier = component.tier if rows else in_memory()
    why = tier.reason_against(placement.device)
    if tier.is_on and component.policy is not None:
        why = why or "its ids come and go; choose another addressing, or leave it in memory"
    if tier.has_folder and placement.folder is None:
        why = why or "no folder is named; give the tables a `Placement` with one"
    if why:
        raise UserError(f"table {component.name!r}: tables.tier is {tier.name}, and {why}")
    tier = component.top_tier if rows else tier
    return cast(RowStore, tier.store(component, rows, dim, placement))


UNALLOCATED = Placement(
    store=lambda component, rows, dim: MemoryStore(component, rows, dim, "meta")
)
"""Tables without memory. Who shards a model puts parts in their place."""


__all__ = [
    "UNALLOCATED",
    "At",
    "Beneath",
    "External",
    "InTransit",
    "MemoryStore",
    "RowStore",
    "new_store",
]
