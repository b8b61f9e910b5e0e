"""Plain memory of the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sparrow.embeddings.spec import Component, Placement, Tier
from sparrow.embeddings.stores import MemoryStore


@dataclass(frozen=True, kw_only=True)
class Config(Tier):
    """All rows are in the memory of the device. The settings are those of other tiers.

    fraction, bytes: how many rows have frames, of all or in bytes. policy: which row gives way.
    """

    is_on: ClassVar[bool] = False

    @property
    def is_in_memory(self) -> bool:
        """See `Tier.is_in_memory`."""
        return True

    def memory_bytes(self, component: Component, rows: int, dim: int) -> int:
        """See `Tier.memory_bytes`."""
        return rows * component.record_bytes(dim)

    def store(self, component: Component, rows: int, dim: int, placement: Placement) -> MemoryStore:
        """See `Tier.store`."""
        return MemoryStore(component, rows, dim, placement.device)
