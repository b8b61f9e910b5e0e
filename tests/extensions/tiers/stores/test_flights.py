from __future__ import annotations

import gc
from typing import Any

import torch

from sparrow.extensions.tiers.stores.flights import Flights
from sparrow.kernels.embedding_bag import Bags, Lookup, Lookups


class Store:
    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.settled = 0

    def fetch(self, rows_N: torch.Tensor, batch: int, settled: int) -> None:
        self.calls.append((rows_N.tolist(), batch, settled))

    def arrive(self, last: int | None = None) -> None:
        self.calls.append(last)

    @property
    def settled_to(self) -> int:
        return self.settled

    def settle_to(self, batch: int) -> None:
        self.settled = batch


def bags_of(*rows: list[int]) -> Bags:
    """Three keys, of which the first and the last look into table 1."""
    ends = [0, *torch.tensor([len(part) for part in rows]).cumsum(0).tolist()]
    lookups = Lookups(
        Lookup(table=table, pooling="sum", key=key, output=0)
        for table, key in ((1, 2), (0, 1), (1, 0))
    )
    of = torch.tensor([row for part in rows for row in part])
    return Bags(
        slots_N=of, offsets_B1=torch.tensor(ends), bags=[1] * 3, bounds=ends, lookups=lookups
    )


def test_batches_are_numbered_fetched_once_and_settled_in_their_order() -> None:
    store: Any = Store()
    flights = Flights({1: store})
    first, second, third = (bags_of([n], [7], [n + 10, n + 20]) for n in (1, 2, 3))
    for bags in (first, second, first):
        flights.fetch(bags)
    assert store.calls == [([1, 11, 21], 1, 0), ([2, 12, 22], 2, 0)]
    flights.begin(first)
    flights.settle()
    flights.begin(third)  # was not fetched before
    assert store.calls[2:] == [1, ([3, 13, 23], 3, 1), 3]
    flights.settle()  # the second is still to be looked up
    flights.fetch(fourth := bags_of([4], [], []))
    assert store.calls[-1] == ([4], 4, 1)
    flights.give_up(second)
    flights.settle()
    del fourth
    gc.collect()
    flights.land()
    flights.settle()
    flights.fetch(first)
    assert store.calls[-2:] == [None, ([1, 11, 21], 5, 4)]


def test_batches_are_numbered_on_from_those_of_a_checkpoint() -> None:
    """Of the store that went on with the most, though nothing was looked up yet when the first
    settle.
    """
    stores: dict[int, Any] = {0: Store(), 1: Store()}
    stores[0].settled, stores[1].settled = 0, 700
    of = Flights(stores)
    of.settle()
    assert [store.settled for store in stores.values()] == [700, 700]
    of.fetch(first := bags_of([1], [7], []))
    of.begin(first)
    of.settle()
    of.fetch(bags_of([2], [], []))
    assert stores[1].calls == [([1], 701, 700), 701, ([2], 702, 701)]
