"""The bytes of rows, wherever they are: of records, of frames above them, and of what says which
ids have rows.

A part of a component is so many of its rows with so many of its columns (`dim`).
"""

from __future__ import annotations

from sparrow.embeddings.spec import Component


def memory_bytes(component: Component, rows: int, dim: int) -> int:
    """Returns the bytes of memory of a part, with its cache's frames and its ids' index, see
    `Tier.memory_bytes`.
    """
    index = component.policy.index_bytes(rows) if component.policy else 0
    return component.top_tier.memory_bytes(component, rows, dim) + index


def disk_bytes(component: Component, rows: int, dim: int) -> int:
    """Returns the bytes of the records of a part that is on a disk, all of them or none."""
    return 0 if component.tier.is_in_memory else rows * component.record_bytes(dim)


def all_bytes(component: Component, rows: int, dim: int) -> int:
    """Returns the bytes of a part wherever they are, on the device, the host and a disk together.

    A row in a frame counts twice, because it is in two places.
    """
    beneath = component.tier.beneath_bytes(component, rows, dim)
    return memory_bytes(component, rows, dim) + beneath + disk_bytes(component, rows, dim)


def state_bytes(component: Component) -> int:
    """Returns the bytes of all that is neither values nor tells which ids have which rows.

    What the rule keeps, touched bytes, and frames of caches and tiers with what belongs to them.
    """
    total = all_bytes(component, component.rows, component.dim)
    return total - component.bytes_values - component.bytes_ids
