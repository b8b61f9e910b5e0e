from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from sparrow.core.errors import UserError, require
from sparrow.embeddings.addressing._size import LogTable, Numbering, Size, Traits
from sparrow.kernels import row_index
from sparrow.kernels.row_index import Policy


@dataclass(frozen=True)
class Dynamic:
    """Ids get rows in training, and lose them to others. `rows_of` returns their keys, of which the
    owner makes rows.

    policy: which ids have rows.
    """

    policy: Policy
    ids = (1 << 63) - 1

    @property
    def traits(self) -> Traits:
        """Rows belong to ids as the policy says."""
        return Traits(policy=self.policy)

    def components(self, dim: int) -> tuple[Size, ...]:
        """Returns one component."""
        return (Size("", self.policy.rows, dim),)

    def rows_of(self, ids_N: Tensor) -> tuple[Tensor, ...]:
        """Returns the keys of the ids, see `sparrow.kernels.row_index`."""
        return (row_index.keys_of(ids_N),)

    def combine(self, dim: int) -> None:
        """Returns None, because there is nothing to combine."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Ids get rows as they come, and lose them when others need them.

    rows: for ids, by default as many as the log's encoding gives the table. bucket: how many rows a
    bucket has at least, if the table has them; an id's row is in its bucket, and a plan cuts
    between buckets. For the others see `Policy`.
    """

    rows: int | None = None
    after: int = 1
    probability: float = 1.0
    evict: Literal["lru", "lfu"] = "lru"
    half_life: float | None = None
    ttl: int | None = None
    clock: Literal["examples", "time"] = "examples"
    bucket: int = 8192

    def __post_init__(self) -> None:
        require(least=1, most=1 << 30, rows=self.rows)
        require(least=1, most=1 << 22, bucket=self.bucket)
        self._policy(self.rows or 1)  # says what is wrong

    def _policy(self, rows: int) -> Policy:
        names = ("after", "probability", "evict", "half_life", "ttl", "clock")
        buckets = 1 << (max(rows // self.bucket, 1).bit_length() - 1)
        return Policy(
            capacity=rows, buckets=buckets, **{name: getattr(self, name) for name in names}
        )

    def build(self, ids: Numbering) -> Dynamic:
        """Returns the addressing of a table with these ids."""
        if not (self.rows or ids.rows):
            raise UserError(
                "rows: how many? The log's ids are hashes of any number; give rows, such as 100_000"
            )
        return Dynamic(self._policy(self.rows or ids.rows))

    def settled(self, tables: Sequence[LogTable]) -> list[Config]:
        """Returns these settings with what the log decides, for each table."""
        return [replace(self, rows=self.build(table.ids).policy.capacity) for table in tables]
