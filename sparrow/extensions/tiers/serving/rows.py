"""`CachedRows`: rows of a table on an SSD, some of which are in memory too."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from sparrow.core.errors import UserError
from sparrow.extensions.tiers.frames import TAG_BYTES
from sparrow.extensions.tiers.serving.blocks import mended
from sparrow.kernels import cached_rows
from sparrow.kernels.block_io import Blocks
from sparrow.kernels.cached_rows import HITS, MISSES, WAITED
from sparrow.kernels.row_cache import WAYS
from sparrow.serving.rows import UnreadableError

_STEP = 1 << 14  # rows that are read at a time to warm a cache


class CachedRows:
    """Rows that are read from blocks, with a cache of some. Threads may share it.

    Args:
        blocks: the rows. They are closed with it.
        table: the name of their table.
        place: their folder.
        bytes: of the cache; one set of frames is the least.
        shared: a folder in memory, if other processes share the cache.

    Raises:
        UserError: when there is no room in that folder.
    """

    def __init__(
        self, blocks: Blocks, table: str, place: Path, bytes: int, shared: Path | None = None
    ) -> None:
        self.blocks = blocks
        self.table = table
        self.place = place
        self.rows = blocks.layout.rows
        sets = int(bytes) // (WAYS * (blocks.layout.record_bytes + TAG_BYTES))
        sets = max(1, min(sets, -(-self.rows // WAYS)))
        try:
            self.cache = cached_rows.cached(
                blocks, sets, shared=shared and shared / f"{place.name}-{sets}"
            )
        except OSError as error:
            blocks.close()
            message = (
                f"table {table!r}: a cache of {bytes / 1e6:,.0f} MB finds no room"
                f" ({error.strerror})"
            )
            raise UserError(f"{shared}: {message}; lower --ssd-cache-mb") from None
        weakref.finalize(self, blocks.close)

    def warm(self, rows_H: Tensor) -> None:
        """Read rows into the cache, in the order of their blocks.

        Args:
            rows_H: int64, the one that is used most first. As many as there are frames are read.

        Raises:
            UnreadableError: see `read`.
        """
        first = rows_H[: self.cache.count]
        for rows_U in first[first < self.rows].unique().split(_STEP):
            read([(self, rows_U)])

    @property
    def counters(self) -> Mapping[str, int]:
        """So far: lookups of rows that were in memory and that were not, and blocks that were
        read.
        """
        hits, misses = self.cache.counts_4[[HITS, MISSES]].tolist()
        return {"hits": hits, "misses": misses, "reads": self.blocks.counters["blocks_read"]}

    @property
    def waited_s(self) -> float:
        """How long threads have waited for each other."""
        return float(self.cache.counts_4[WAITED]) / 1e9


def read(requests: Sequence[tuple[CachedRows, Tensor]]) -> list[dict[str, Tensor]]:
    """Returns field -> its entries [N, ...] in some rows of each table. What is not in memory is
    read at the same time.

    Args:
        requests: tables and int64 [N] of rows, see `cached_rows.get`.

    Raises:
        UnreadableError: when a block cannot be read, or is not what was written.
    """
    answers = cached_rows.get([(rows.cache, rows_N) for rows, rows_N in requests])
    for (rows, _), (_, error) in zip(requests, answers, strict=True):
        if error is not None:
            raise UnreadableError(mended(error, rows.place)) from None
    return [fields for fields, _ in answers]
