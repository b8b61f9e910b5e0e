"""Files of blocks on an SSD, beneath frames in memory (MTrainS, arXiv 2305.01515, section 5)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sparrow.embeddings.spec import Component, Placement, Tier
from sparrow.extensions.tiers.folders import with_folder
from sparrow.extensions.tiers.frames import tier_bytes
from sparrow.extensions.tiers.stores.ssd import SsdStore, queue_bytes
from sparrow.kernels.block_io import Layout

MAP = 12  # bytes of memory for a block: its place, its generation and who reads it
SPARE = 1.1  # a block is written elsewhere before its old place is free


@dataclass(frozen=True, kw_only=True)
class Config(Tier):
    """Rows are on an SSD. See `Tier` for the frames."""

    has_blocks: ClassVar[bool] = True

    def reason_against(self, device: str) -> str:
        """See `Tier.reason_against`."""
        return "" if device == "cpu" else "its rows learn on a GPU; use --device cpu"

    def disk_bytes(self, component: Component, used: float, hosts: int) -> int:
        """See `Tier.disk_bytes`."""
        layout = Layout(fields=component.fields, rows=component.rows)
        return int(SPARE * layout.block * min(layout.blocks / hosts, used))

    def memory_bytes(self, component: Component, rows: int, dim: int) -> int:
        """Returns the bytes of frames, of what says where blocks are, and of rows that wait to be
        written.
        """
        blocks = Layout(fields=component.fields_of(dim), rows=rows).blocks
        return tier_bytes(component, rows, dim) + blocks * MAP + queue_bytes(component, rows)

    def store(self, component: Component, rows: int, dim: int, placement: Placement) -> SsdStore:
        """See `Tier.store`."""
        return SsdStore(component, rows, dim, with_folder(placement))
