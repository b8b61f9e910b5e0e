"""Which id has which row of a table whose ids come and go: admission, eviction and expiry.

An id is a number of 63 bits. `keys_of` makes its key of it, by a bijection that looks random. The
high bits of a key say the id's bucket. A bucket has rows of its own, so what happens to an id
depends on the ids of its bucket alone, wherever the bucket is kept. The first row of a bucket is
for its ids that have none. Id 0, a missing id, has the second row of bucket 0 for ever.

A row is free, or it belongs to an id, with the time when a batch of training last used it. Under
lfu it also has a count of such batches, which halves with every `half_life` that passes. impl: see
`sparrow.kernels`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from sparrow.core.errors import UserError, require
from sparrow.kernels import Impl, Operator

_operator = Operator(__name__)

FREE, SHARED = -1, -2  # in the place of an id: no id has this row; ids without a row share it
SKETCH = 4  # counters of sightings for each row, and how many of them an id has
BITS = 63
COUNT_NAMES = ("looked_up", "live", "hits", "admitted", "evicted", "expired", "waiting", "crowded")
"""What `admit` counts: lookups, and those of them that found a row of their id's own; then
different ids: those that had a row, those that got one, those that lost it to them, those whose row
was too old, those that were not admitted yet, and those that found all rows of their bucket in use.
"""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Which ids have rows.

    Args:
        capacity: rows for ids.
        buckets: a power of two.
        after: how many sightings an id needs, at most 255. A sighting is a batch that has the id.
            They are counted in a sketch of 4 bytes a row (count-min, Cormode and Muthukrishnan
            2005), which may count too many. Its counts halve after as many sightings as the bucket
            has rows, so that sightings far apart do not add up.
        probability: with which a sighting admits an id, by a number that depends on seed, table, id
            and batch alone.
        evict: who gives way where a bucket is full: the id that was used least recently (lru) or
            least often (lfu).
        half_life: of counts, in the clock's unit. None keeps them.
        ttl: how long an id keeps its row without a use, in the clock's unit. None is for ever.
        clock: what time is counted in: training "examples", or the log's "time".
    """

    capacity: int
    buckets: int = 1
    after: int = 1
    probability: float = 1.0
    evict: Literal["lru", "lfu"] = "lru"
    half_life: float | None = None
    ttl: int | None = None
    clock: Literal["examples", "time"] = "examples"

    def __post_init__(self) -> None:
        require(least=1, most=1 << 30, capacity=self.capacity)
        # more are not counted one by one
        require(most=1 << 23, rows_of_a_bucket=self.capacity // self.buckets)
        require(least=1, ttl=self.ttl)
        require(least=1, most=255, after=self.after)
        require(above=0, most=1, probability=self.probability)
        require(above=0, half_life=self.half_life)
        if self.half_life and self.evict != "lfu":
            raise UserError("half_life: only lfu counts; choose evict lfu, or leave it out")

    @property
    def rows(self) -> int:
        """All rows: those for ids, one of each bucket, and that of missing ids."""
        return self.capacity + self.buckets + 1

    @property
    def shift(self) -> int:
        """How many bits of a key follow those of its bucket."""
        return BITS - (self.buckets - 1).bit_length()

    def start(self, bucket: int) -> int:
        """Returns the first row of a bucket; that of the bucket after the last one is the number of
        rows.
        """
        return bucket * self.capacity // self.buckets + bucket + (bucket > 0)

    def blocks(self, parts: int) -> list[tuple[tuple[int, int], tuple[int, int]]]:
        """Returns rows [first, last) and keys [first, last) of each block when whole buckets are
        cut into `parts`.
        """
        block = -(-self.buckets // parts)
        edges = [min(part * block, self.buckets) for part in range(parts + 1)]
        return [
            ((self.start(low), self.start(high)), (low << self.shift, high << self.shift))
            for low, high in pairwise(edges)
        ]

    def index(self, first: int, key: int, fields: Mapping[str, Tensor]) -> Index:
        """Returns the rows of some neighbouring buckets.

        Args:
            first: see `Index`.
            key: see `Index`.
            fields: "id", "time", "count" and "sightings" of the rows; the four counters of
                sightings are one int32.
        """
        return Index(
            policy=self,
            first=first,
            key=key,
            ids_R=fields["id"],
            times_R=fields["time"],
            counts_R=fields["count"],
            sightings_RC=fields["sightings"].view(torch.uint8).view(-1, SKETCH),
        )

    def index_bytes(self, rows: int) -> int:
        """Returns the bytes beside the row records for the index of so many rows, of whole
        buckets.
        """
        buckets = round(rows * self.buckets / self.rows)
        return 16 * (slots(rows) + rows // 8 + 33 * buckets) + 40 * buckets


def slots(rows: int) -> int:
    """Returns how many places the hash table of so many rows has."""
    return rows + rows // 2 + 8


@dataclass(kw_only=True, eq=False)
class Index:
    """The rows of some neighbouring buckets of a table, rows [first, first + R) of it.

    Args:
        policy: of the table.
        first: the first row, which is the first of a bucket.
        key: of seed and table, 64 bits.
        ids_R: int64 [R], the id of each row, FREE or SHARED.
        times_R: int64 [R], when it was last used.
        counts_R: float32 [R], in how many batches, as of then; 1 under lru. That of a bucket's
            first row is the number of sightings since their counts last halved.
        sightings_RC: uint8 [R, 4], the sketch. A bucket has those of all its rows.
        work: what the implementation has made of all this. None makes it anew: set it where rows
            were written.
    """

    policy: Policy
    first: int
    key: int
    ids_R: Tensor
    times_R: Tensor
    counts_R: Tensor
    sightings_RC: Tensor
    work: Any = None

    @cached_property
    def buckets(self) -> range:
        """The buckets that are here."""
        starts = [self.policy.start(bucket) for bucket in range(self.policy.buckets + 1)]
        return range(starts.index(self.first), starts.index(self.first + len(self.ids_R)))

    @cached_property
    def starts_B1(self) -> Tensor:
        """Where each bucket's rows begin here, and where the last one's end: int64 [B + 1]."""
        edges = range(self.buckets.start, self.buckets.stop + 1)
        return torch.tensor([self.policy.start(bucket) - self.first for bucket in edges])

    @property
    def nbytes(self) -> int:
        """Bytes of what the implementation keeps beside the rows."""
        return getattr(self.work, "nbytes", 0)

    def find(self, keys_N: Tensor, now: int) -> Tensor:
        """See the function `find`."""
        return find(self, keys_N, now)

    def admit(self, keys_N: Tensor, now: int, batch: int, settled: int) -> Admitted:
        """See the function `admit`."""
        return admit(self, keys_N, now, batch, settled)

    def begin(self) -> None:
        """Free all rows but those that never belong to others."""
        self.ids_R.fill_(FREE)
        self.ids_R[self.starts_B1[:-1]] = SHARED
        self.times_R.zero_()
        self.counts_R.zero_()
        self.sightings_RC.zero_()
        if self.first == 0 and len(self.ids_R):
            self.ids_R[1] = 0
        self.work = None


class Admitted(NamedTuple):
    """Where the ids of a batch are.

    rows_N: int64 [N], counted from the first one here. begun_L, ids_L: int64 [L], the rows that
    were given to ids, each once, and these ids. freed_F: int64 [F], the rows that were too old,
    some of which may have been given away since. counts: see `COUNT_NAMES`.
    """

    rows_N: Tensor
    begun_L: Tensor
    ids_L: Tensor
    freed_F: Tensor
    counts: dict[str, int]


def keys_of(ids_N: Tensor, *, impl: Impl = "auto") -> Tensor:
    """Returns the key of each id 0 <= id < 2**63, int64 [N]. Different ids have different keys, and
    0 has 0.
    """
    keys_N: Tensor = _operator.choose(impl, ids_N.device).keys_of(ids_N.contiguous())
    return keys_N


def find(index: Index, keys_N: Tensor, now: int, *, impl: Impl = "auto") -> Tensor:
    """Returns the row of each id, and the first row of its bucket for ids that have none. Nothing
    is changed.

    Args:
        index: the rows.
        keys_N: int64 [N], counted from the first key of the first bucket here.
        now: the time, as of the last batch.
        impl: see `sparrow.kernels`.
    """
    rows_N: Tensor = _operator.choose(impl, keys_N.device).find(index, keys_N, now)
    return rows_N


def admit(
    index: Index, keys_N: Tensor, now: int, batch: int, settled: int, *, impl: Impl = "auto"
) -> Admitted:
    """Use the rows of a batch of training, and give rows to its new ids as the policy says.

    The result depends on the set of keys. First each id that has a row uses it, if it did so at
    most the ttl ago, or after batch `settled`. The others follow in ascending order of their keys;
    whose row is too old loses it. One is sighted, and may be admitted. It then gets the first free
    row of its bucket. If none is free, all rows are freed that are too old. Else it gets that of
    the id that gives way: of those that no batch after `settled` used, the one used first (lru), or
    that with the smallest count by now (lfu), and of equal ones that with the first row. If there
    is none it gets no row.

    Args:
        index: is changed.
        keys_N: as `find` takes them.
        now: the time, not before that of earlier batches.
        batch: the number of this batch, above all before.
        settled: the number of the last batch whose rows may be given away.
        impl: see `sparrow.kernels`.
    """
    admitted: Admitted = _operator.choose(impl, keys_N.device).admit(
        index, keys_N, now, batch, settled
    )
    return admitted


__all__ = [
    "COUNT_NAMES",
    "FREE",
    "SHARED",
    "SKETCH",
    "Admitted",
    "Index",
    "Policy",
    "admit",
    "find",
    "keys_of",
    "slots",
]
