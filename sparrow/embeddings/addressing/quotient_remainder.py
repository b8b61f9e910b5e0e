from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sparrow.embeddings.addressing._partitions import PartitionConfig, Partitions, equal_size
from sparrow.embeddings.addressing._size import Numbering


@dataclass(frozen=True)
class QuotientRemainder(Partitions):
    """The digits of an id in a mixed radix, the lowest first: id mod m and id // m where there are two.

    Frequent ids come first, so they have rows of their own in the first component (arXiv 1909.02107, sections 2, 3.1).
    """

    def parts_of(self, ids_N: Tensor) -> tuple[Tensor, ...]:
        """Returns what `Partitions.parts_of` says."""
        found = []
        for size in self.sizes[:-1]:
            found.append(ids_N % size)
            ids_N = ids_N // size
        return (*found, ids_N)


@dataclass(frozen=True, kw_only=True)
class Config(PartitionConfig):
    """An id's vector is made of those of its remainder and of its quotient. See `PartitionConfig`."""

    def build(self, ids: Numbering) -> QuotientRemainder:
        """Returns what `AddressingConfig.build` says."""
        sizes = self.sizes_for(ids)
        names = ("remainder", "quotient") if len(sizes) == 2 else tuple(f"digit{i}" for i in range(len(sizes)))
        return QuotientRemainder(ids.rows, sizes, names, self.operation, not ids.is_numbered)

    def default_sizes(self, rows: int) -> tuple[int, ...]:
        """Returns what `PartitionConfig.default_sizes` says. The last one is what the others leave."""
        sizes = [self.first_size(rows)]
        left = -(-rows // sizes[0])
        middle = equal_size(left, self.parts - 1)
        for _ in range(self.parts - 2):
            sizes.append(middle)
            left = -(-left // middle)
        return (*sizes, left)
