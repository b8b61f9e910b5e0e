from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from torch import Tensor

from sparrow.core.errors import UserError
from sparrow.embeddings.addressing._partitions import (
    PartitionConfig,
    Partitions,
    equal_size,
    require_distinct,
)
from sparrow.embeddings.addressing._size import LogTable, Numbering


def remainders(ids_N: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Returns id mod m for several coprime m: the Chinese remainder theorem (arXiv 1909.02107,
    section 3.1).
    """
    return tuple(ids_N % size for size in sizes)


@dataclass(frozen=True, kw_only=True)
class Config(PartitionConfig):
    """An id's vector is made of those of its remainders by coprime numbers.

    collisions: how many ids share a row of the first component; 0 makes all components about equal.
    parts: how many components. operation: "mult", "add", "concat" (they share the columns) or
    "features" (each has all columns, and a model takes it for a feature). sizes: these numbers
    instead. fold: take hashes modulo the rows of the log first.
    """

    def build(self, ids: Numbering) -> Partitions:
        """Returns the addressing of a table with these ids."""
        sizes = self.sizes_for(ids)
        for first, second in combinations(sizes, 2):
            if math.gcd(first, second) > 1:
                raise UserError(
                    f"sizes: {first} and {second} have the divisor {math.gcd(first, second)}; take"
                    " coprime ones"
                )
        names = tuple(f"mod{size}" for size in sizes)
        return Partitions(ids.rows, sizes, names, self.operation, remainders, not ids.is_numbered)

    def settled(self, tables: Sequence[LogTable]) -> list[Config]:
        """Returns these settings with what the log decides, for each table. A log that has grown
        beyond their product is refused.
        """
        return [replace(self, sizes=self.sizes_for(table.ids)) for table in tables]

    def sizes_for(self, ids: Numbering) -> tuple[int, ...]:
        """Returns the rows of each component: those given, or the next numbers that are coprime to
        those before.

        Raises:
            UserError: as `require_distinct` does.
        """
        if self.sizes:
            return require_distinct(self.sizes, ids, self.fold)
        sizes = [self.first_size(ids.rows)]
        least = max(2, equal_size(-(-ids.rows // sizes[0]), self.parts - 1))
        while len(sizes) < self.parts:
            size = least
            while any(math.gcd(size, earlier) > 1 for earlier in sizes):
                size += 1
            sizes.append(size)
        return require_distinct(tuple(sizes), ids, self.fold)
