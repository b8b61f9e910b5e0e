"""Which tables of a model are read from an SSD, and how much of them is kept in memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from sparrow.core.errors import UserError, require, suggest
from sparrow.kernels.block_io import Way

MB = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Ssd:
    """Tables that are read from an SSD. It changes speed and memory, never scores, unless `any_order` is given.

    Args:
        folder: where their rows are written as blocks, once for each table. It must be on the SSD.
        cache_mb: of rows in memory, for all tables together, each in proportion to its bytes.
        in_memory: tables that stay in memory, by name, as those of candidates should.
        least_mb: smaller tables stay in memory too.
        pooled_mb: of vectors of whole lists in memory; 0 for none.
        pooled_length: lists with fewer ids have no such vector.
        any_order: whether the vector of a list is also used for lists with the same ids and weights in another order.
            Their sums may differ in the last bit.
        decoded: whether rows are written in fp32, whatever their format is. Reading them is less work for the
            processor, and takes more room on the disk and in memory.
        way: how blocks are read, see `block_io`.
        shared: a folder in memory, such as one under /dev/shm, for caches that all processes share who give it; None
            for caches of a process alone.

    Raises:
        UserError: for a number that is out of range.
    """

    folder: Path
    cache_mb: float = 1024.0
    in_memory: tuple[str, ...] = ()
    least_mb: float = 64.0
    pooled_mb: float = 0.0
    pooled_length: int = 32
    any_order: bool = False
    decoded: bool = False
    way: Way = "auto"
    shared: Path | None = None

    def __post_init__(self) -> None:
        require(least=0, cache_mb=self.cache_mb, least_mb=self.least_mb, pooled_mb=self.pooled_mb)
        require(least=1, pooled_length=self.pooled_length)

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
            if size >= self.least_mb * MB and not any(_is_part(component, name) for name in self.in_memory)
        ]


def _is_part(component: str, table: str) -> bool:
    """Whether a component is a table, or one of its parts, which are named TABLE.PART."""
    return component == table or component.startswith(f"{table}.")
