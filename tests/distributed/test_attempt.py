"""Ranks agree on an attempt through a store that outlives them; here they are threads, each with
its own client.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from sparrow.core import UserError
from sparrow.distributed.attempt import agree


class Ranks:
    """Ranks that come to one store, when they are told to."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self.server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._pool = pool

    def come(self, rank: int, size: int, limit_s: float = 60) -> Future[int]:
        client = dist.TCPStore(
            "127.0.0.1", self.server.port, is_master=False, wait_for_workers=False
        )
        return self._pool.submit(agree, client, rank, size, timedelta(seconds=limit_s))

    def all_come(self, size: int) -> int:
        """The number that they agree on."""
        return one(*(self.come(rank, size) for rank in range(size)))


def one(*came: Future[int]) -> int:
    (number,) = {future.result(60) for future in came}
    return number


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    with ThreadPoolExecutor(16) as pool:
        yield Ranks(pool)


def test_every_attempt_has_a_number_of_its_own(ranks: Ranks) -> None:
    """Also of more and of fewer ranks than the one before."""
    numbers = [ranks.all_come(size) for size in (5, 3, 5, 2)]
    assert len(set(numbers)) == 4


def test_who_comes_first_waits_for_the_new_attempt(ranks: Ranks) -> None:
    """The store is full of what the old one left: its number, and the words of ranks that are
    gone.
    """
    before = ranks.all_come(3)
    early = [ranks.come(rank, 3) for rank in (1, 2)]
    time.sleep(0.3)
    assert not any(future.done() for future in early)
    assert one(*early, ranks.come(0, 3)) != before


def test_rank_0_ends_before_it_has_heard_all(ranks: Ranks) -> None:
    """One rank has answered it already, and answers the next one too."""
    gone, waits = ranks.come(0, 3, 0.5), ranks.come(1, 3)
    with pytest.raises(UserError, match=r"not all of 3 ranks came within 0\.5 s: rank 2 did not"):
        gone.result(60)
    assert not waits.done()
    one(waits, ranks.come(2, 3), ranks.come(0, 3))


def test_a_rank_comes_again_before_all_are_there(ranks: Ranks) -> None:
    """It answered, ended and was started again: its last word counts."""
    rank0 = ranks.come(0, 3)
    ended = ranks.come(1, 3, 0.3)
    with pytest.raises(UserError, match="rank 0 did not"):
        ended.result(60)
    one(rank0, ranks.come(1, 3), ranks.come(2, 3))


def test_the_missing_are_named(ranks: Ranks) -> None:
    came = [ranks.come(rank, 9, 0.5) for rank in (0, 3)]
    with pytest.raises(UserError, match=r"ranks 1, 2, 4, 5 and 3 more did not"):
        came[0].result(60)
    with pytest.raises(UserError, match=r"rank 0 did not"):
        came[1].result(60)
