"""What ranks find out about a failure, through one store; here they are threads, each with a client of its own."""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from sparrow.core import UserError
from sparrow.distributed import limits, watch
from sparrow.distributed.watch import Watch
from tests.pace import Deadline

MINUTE = timedelta(minutes=1)
Begin = Callable[[int], list[Watch]]


@pytest.fixture
def begin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Begin]:
    """As many ranks as asked for, each at a place of its own number."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(server.port))
    made: list[Watch] = []

    def of(size: int) -> list[Watch]:
        with ThreadPoolExecutor(64) as pool:
            made.extend(pool.map(lambda rank: Watch("job", rank, size, lambda: "step 7, vectors", MINUTE), range(size)))
        return made

    yield of
    for one in made:
        one.stop()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that speak, and lose patience, sooner."""
    monkeypatch.setattr(watch, "EVERY_S", 0.1)
    monkeypatch.setattr(watch, "PATIENCE_S", 1.0)


def explain(ranks: list[Watch]) -> list[str]:
    """What each says, all at once."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(lambda rank: rank.explain("Connection closed"), ranks))


@pytest.mark.parametrize(("size", "told"), [(512, True), (64, False), pytest.param(512, False, marks=pytest.mark.slow)])
def test_many_ranks_learn_who_was_the_first(begin: Begin, size: int, told: bool) -> None:
    """That a rank ended, or that it said nothing any more."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        limits.allow(size)
    except UserError as reason:
        pytest.skip(str(reason))
    ranks = begin(size)
    first, others = ranks[7], ranks[:7] + ranks[8:]
    if told:
        first.end("feature 'user': id 99")
    first.stop()
    limit = Deadline(15, watch.PATIENCE_S)  # one late answer alone is 30 s
    said = explain(others)
    assert not limit.over
    cause = (
        "rank 7 ended at step 7, vectors: feature 'user': id 99"
        if told
        else "rank 7 (last at step 7, vectors) is gone or stopped"
    )
    for rank, line in zip(others, said, strict=True):
        assert line == f"{cause}; rank {rank.rank} was at step 7, vectors (Connection closed)"
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_one_rank_reads_what_all_have_told(begin: Begin, quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice; the others ask it."""
    readers: list[int] = []
    read = Watch._all
    monkeypatch.setattr(Watch, "_all", lambda self: readers.append(self.rank) or read(self))
    ranks = begin(8)
    ranks[3].stop()
    assert len({line.partition(";")[0] for line in explain(ranks[:3] + ranks[4:])}) == 1
    assert len(readers) == 2 and len(set(readers)) == 1


def test_the_one_that_was_to_find_out_has_gone_too(begin: Begin, quick: None) -> None:
    ranks = begin(4)
    ranks[0]._store.add("asked", 1)
    ranks[0].stop()
    ranks[2].stop()
    for line in explain([ranks[1], ranks[3]]):
        gone = "rank 0 (last at step 7, vectors), rank 2 (last at step 7, vectors) are gone or stopped"
        assert line.startswith(f"{gone}; rank ")


def test_no_rank_is_gone_on_a_busy_machine(begin: Begin, quick: None) -> None:
    """All speak late there: one that has not been heard yet is no worse off than one that was heard once."""
    ranks = begin(3)
    for one in ranks[1:]:
        one.stop()
        one._thread.join()
    late = [threading.Timer(0.5, ranks[1]._tell), threading.Timer(1.5, ranks[2]._tell)]
    for timer in late:
        timer.start()
    assert explain(ranks[:1])[0].startswith("rank 0 waited in vain: all ranks are there; ")


def test_a_rank_that_never_came_is_named(begin: Begin, quick: None) -> None:
    """The store would make us wait for what was never set."""
    ranks = begin(2)
    for one in ranks:
        one.size = 3
    assert explain(ranks[:1])[0].startswith("rank 2 (last at its start) is gone or stopped; rank 0 was at step 7")


def test_a_line_names_the_first_of_many(begin: Begin, quick: None) -> None:
    ranks = begin(9)
    for one in ranks[2:]:
        one.stop()
    (line,) = explain(ranks[:1])
    assert line.count("(last at") == 4 and " and 3 more are gone or stopped; rank 0 was" in line


def test_ranks_at_other_places_are_named(begin: Begin, quick: None) -> None:
    ranks = begin(3)
    ranks[2]._where = lambda: "step 7, reading a slow disk"
    (line,) = explain(ranks[1:2])
    assert line == (
        "rank 1 waited in vain: rank 2 is at step 7, reading a slow disk; rank 1 was at step 7, vectors "
        "(Connection closed)"
    )


def test_another_job_on_the_same_store_is_not_mixed_in(begin: Begin, quick: None) -> None:
    """A second training of the same processes, or another attempt."""
    begin(2)[1].end("the first job's mistake")
    second = [Watch("second", rank, 2, lambda: "start") for rank in range(2)]
    second[1].stop()
    assert explain(second[:1])[0].startswith("rank 1 (last at start) is gone or stopped")
    second[0].stop()


def test_nothing_is_told_once_it_has_stopped(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch aborts a process that ends while a thread of it waits for the store."""
    monkeypatch.setattr(watch, "EVERY_S", 0.0001)
    tell = Watch._tell
    monkeypatch.setattr(Watch, "_tell", lambda self, **more: (time.sleep(0.01), tell(self, **more)))
    for one in begin(8):
        one.stop()
        assert not one._thread.is_alive()
