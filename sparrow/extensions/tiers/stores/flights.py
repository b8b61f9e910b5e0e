"""`Flights`: batches of training whose rows of tables on an SSD are under way."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch

from sparrow.kernels.embedding_bag import Bags


class Flights:
    """Numbers the batches, and knows which are still to be looked up.

    Args:
        stores: table -> its rows, for tables on an SSD, with a cache of exact rows or without:
            `SsdStore`s or `CachedStore`s.
    """

    def __init__(self, stores: Mapping[int, Any]) -> None:
        self.stores = stores
        self._batch = 0  # the number of the last one
        self._settled = 0  # see `SsdStore.fetch`
        self._batch_of: weakref.WeakKeyDictionary[Bags, int] = weakref.WeakKeyDictionary()

    def fetch(self, bags: Bags) -> None:
        """Begin to read the rows of a batch, once.

        bags: of rows.

        Raises:
            UserError: see `SsdStore.fetch`.
        """
        if bags in self._batch_of:
            return
        self._go_on()
        self._batch += 1
        for number, store in self.stores.items():
            keys = {f.key for f in bags.lookups if f.table == number} | {
                f.by_key for f in bags.lookups if f.by == number
            }
            rows = [bags.slots_N[bags.bounds[key] : bags.bounds[key + 1]] for key in sorted(keys)]
            if rows:
                store.fetch(torch.cat(rows), self._batch, self._settled)
        self._batch_of[bags] = self._batch

    def begin(self, bags: Bags) -> None:
        """Have all rows of a batch in frames. It is looked up now."""
        self.fetch(bags)
        batch = self._batch_of.pop(bags)
        for store in self.stores.values():
            store.arrive(batch)

    def give_up(self, bags: Bags) -> None:
        """Forget a batch that nobody will look up."""
        self._batch_of.pop(bags, None)

    def settle(self) -> None:
        """Hear that all batches that were looked up have learnt, or never will."""
        self._go_on()
        self._settled = min(self._batch_of.values(), default=self._batch + 1) - 1
        for store in self.stores.values():
            store.settle_to(self._settled)

    def _go_on(self) -> None:
        """Number batches on from those of the checkpoint with which stores have gone on."""
        if not self._batch:
            self._batch = self._settled = max(
                (store.settled_to for store in self.stores.values()), default=0
            )

    def land(self) -> None:
        """Wait for all rows that are under way."""
        for store in self.stores.values():
            store.arrive()
