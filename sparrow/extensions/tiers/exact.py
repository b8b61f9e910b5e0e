"""fp32 frames for the rows that are used most, above rows in few bits (arXiv 2010.11305)."""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import override

from sparrow.embeddings.spec import Cache, Component, Placement, Tier
from sparrow.extensions.tiers.frames import exact_bytes, exact_frames
from sparrow.extensions.tiers.stores.cached import CachedStore
from sparrow.kernels.row_cache.policies import policy_of


@dataclass(frozen=True, kw_only=True)
class Config(Tier):
    """Exact rows above those of a tier.

    cache: how many they are.
    beneath: the tier.
    """

    cache: Cache
    beneath: Tier

    @override
    def memory_bytes(self, component: Component, rows: int, dim: int) -> int:
        frames = exact_frames(component, rows) * exact_bytes(component, dim)
        counts = rows * policy_of(self.cache.policy).bytes_row
        return self.beneath.memory_bytes(component, rows, dim) + frames + counts

    @override
    def store(self, component: Component, rows: int, dim: int, placement: Placement) -> CachedStore:
        beneath = self.beneath.store(component, rows, dim, placement)
        return CachedStore(component, rows, dim, beneath, placement.device)
