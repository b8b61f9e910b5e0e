from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from sparrow.embeddings.addressing._partitions import (
    PartitionConfig,
    Partitions,
    equal_size,
    require_distinct,
)
from sparrow.embeddings.addressing._size import LogTable, Numbering


def digits(ids_N: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Returns the digits of an id in a mixed radix, the lowest first: id mod m and id // m where
    there are two.

    Frequent ids come first, so they have rows of their own in the first component (arXiv
    1909.02107, sections 2, 3.1).
    """
    remainders = []
    for size in sizes[:-1]:
        quotient_N = ids_N // size
        remainders.append(ids_N - quotient_N * size)  # a third of the time of %
        ids_N = quotient_N
    return (*remainders, ids_N)


@dataclass(frozen=True, kw_only=True)
class Config(PartitionConfig):
    """An id's vector is made of those of its remainder and of its quotient.

    collisions: how many ids share a row of the first component; 0 makes all components about equal.
    parts: how many components. operation: "mult", "add", "concat" (they share the columns) or
    "features" (each has all columns, and a model takes it for a feature). sizes: the rows of each
    component instead, the first one's first; the last may be left out, which has what they leave
    and grows. fold: take hashes modulo the rows of the log first.
    """

    @property
    def fewest_sizes(self) -> int:
        """One where there are two parts, since the last size may be left out, else two."""
        return min(2, self.parts - 1)

    def build(self, ids: Numbering) -> Partitions:
        """Returns the addressing of a table with these ids."""
        sizes = self.sizes_for(ids)
        names = (
            ("remainder", "quotient")
            if len(sizes) == 2
            else tuple(f"digit{i}" for i in range(len(sizes)))
        )
        return Partitions(ids.rows, sizes, names, self.operation, digits, not ids.is_numbered)

    def settled(self, tables: Sequence[LogTable]) -> list[Config]:
        """Returns these settings with every modulus, and not the quotient, for each table."""
        sizes = [self.sizes_for(table.ids) for table in tables]
        if self.sizes:
            return [self for _ in tables]
        return [replace(self, sizes=parts[:-1], parts=len(parts)) for parts in sizes]

    def sizes_for(self, ids: Numbering) -> tuple[int, ...]:
        """Returns the rows of each component. Those that are not given have what the others leave.

        Raises:
            UserError: as `require_distinct` does.
        """
        if self.sizes and len(self.sizes) != self.parts - 1:
            return require_distinct(self.sizes, ids, self.fold)
        sizes = list(self.sizes) or [self.first_size(ids.rows)]
        left = -(-ids.rows // math.prod(sizes))
        middle = equal_size(left, self.parts - len(sizes))
        while len(sizes) < self.parts - 1:
            sizes.append(middle)
            left = -(-left // middle)
        return require_distinct((*sizes, left), ids, self.fold)
