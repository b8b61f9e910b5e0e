"""The memory of the host, or an SSD beneath it, beneath frames on a device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from sparrow.core import UserError
from sparrow.embeddings.spec import TIERS, Component, Placement, Tier
from sparrow.extensions.tiers.folders import with_folder
from sparrow.extensions.tiers.frames import tier_bytes
from sparrow.extensions.tiers.stores.host import HostStore


@dataclass(frozen=True, kw_only=True)
class Config(Tier):
    """Rows are in the memory of the host. See `Tier` for the frames, which are on the device.

    beneath: where rows are that the host has no frame for, an "ssd"; by default it has all.
    """

    beneath: Annotated[Tier | None, TIERS] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beneath and not self.beneath.has_blocks:
            raise UserError(f"beneath: {self.beneath.name}; only an ssd is beneath the host")

    @property
    def has_folder(self) -> bool:
        """See `Tier.has_folder`."""
        return self.beneath is not None

    @property
    def is_in_memory(self) -> bool:
        """See `Tier.is_in_memory`."""
        return self.beneath is None

    def advice(self, device: str) -> str:
        """See `Tier.advice`."""
        if device != "cpu":
            return ""
        return "host memory is all that a CPU has, so that frames are a second copy; leave host out"

    def disk_bytes(self, component: Component, used: float, hosts: int) -> int:
        """See `Tier.disk_bytes`."""
        return self.beneath.disk_bytes(component, used, hosts) if self.beneath else 0

    def memory_bytes(self, component: Component, rows: int, dim: int) -> int:
        """Returns the bytes of frames."""
        return tier_bytes(component, rows, dim)

    def beneath_bytes(self, component: Component, rows: int, dim: int) -> int:
        """See `Tier.beneath_bytes`."""
        if self.beneath:
            return self.beneath.memory_bytes(replace(component, tier=self.beneath), rows, dim)
        return rows * (1 + component.record_bytes(dim))

    def store(self, component: Component, rows: int, dim: int, placement: Placement) -> HostStore:
        """See `Tier.store`."""
        return HostStore(
            component,
            rows,
            dim,
            with_folder(placement) if self.beneath else placement,
            self.beneath,
        )
