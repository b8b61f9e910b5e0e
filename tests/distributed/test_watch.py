"""What ranks find out about a failure, through one store; here they are threads, each with a client
of its own.
"""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
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
    # as if each had a host of its own: all are one process here
    monkeypatch.setattr(watch, "HOST", "")
    made: list[Watch] = []

    def of(size: int) -> list[Watch]:
        with ThreadPoolExecutor(64) as pool:
            made.extend(
                pool.map(
                    lambda rank: Watch("job", rank, size, lambda: "step 7, vectors", MINUTE),
                    range(size),
                )
            )
        return made

    yield of
    for one in made:
        one.stop()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that speak, and lose patience, sooner."""
    monkeypatch.setattr(watch, "EVERY_S", 0.05)
    monkeypatch.setattr(watch, "PATIENCE_S", 0.5)
    monkeypatch.setattr(watch, "SILENT_S", 1.0)


def explain(ranks: list[Watch]) -> list[str]:
    """What each says, all at once."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        return [line for _, line in pool.map(lambda rank: rank.explain("Connection closed"), ranks)]


@pytest.mark.parametrize(
    ("size", "told"),
    [
        (128, True),
        (64, False),
        *(pytest.param(512, told, marks=pytest.mark.slow) for told in (True, False)),
    ],
)
def test_many_ranks_learn_who_was_the_first(
    begin: Begin, request: pytest.FixtureRequest, size: int, told: bool
) -> None:
    """That a rank ended, or that it said nothing any more."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    request.addfinalizer(lambda: resource.setrlimit(resource.RLIMIT_NOFILE, before))
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


def test_one_rank_reads_what_all_have_told(
    begin: Begin, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice; the others ask it."""
    readers: list[int] = []
    read = Watch._last_words
    monkeypatch.setattr(Watch, "_last_words", lambda self: readers.append(self.rank) or read(self))
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
        gone = (
            "rank 0 (last at step 7, vectors), rank 2 (last at step 7, vectors) are gone or stopped"
        )
        assert line.startswith(f"{gone}; rank ")


def test_no_rank_is_gone_on_a_busy_machine(
    begin: Begin, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All speak late there: one that has not been heard yet is no worse off than one that was heard
    once.
    """
    monkeypatch.setattr(watch, "PATIENCE_S", 1.0)
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
    assert explain(ranks[:1])[0].startswith(
        "rank 2 (last at its start) is gone or stopped; rank 0 was at step 7"
    )


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
    assert (
        line
        == "rank 1 waited in vain: rank 2 is at step 7, reading a slow disk; rank 1 was at step 7,"
        " vectors (Connection closed)"
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


def wait_in(ranks: list[Watch], wait: int = 1) -> None:
    """All ranks are in one wait from now on."""
    for one in ranks:
        one._waits._open.add(wait)


def until(happened: Callable[[], bool]) -> None:
    limit = Deadline(30)
    while not happened():
        assert not limit.over
        time.sleep(0.01)


@pytest.mark.parametrize(("size", "gone"), [(2, [1]), (3, [0]), (3, [1]), (5, [1, 2])])
def test_waits_for_a_silent_rank_end(begin: Begin, quick: None, size: int, gone: list[int]) -> None:
    """Also where the rank that listens to it is silent too. All that wait say the same."""
    ranks = begin(size)
    others = [one for one in ranks if one.rank not in gone]
    until(lambda: all(one._heard for one in ranks))
    wait_in(ranks)
    for rank in gone:
        ranks[rank].stop()
    until(lambda: all(one._waits.reason for one in others))
    who = " and ".join(
        ["", *(f"rank {rank} (last at step 7, vectors)" for rank in gone)][1:]
    ).replace(" and ", ", ")
    verb = "is" if len(gone) == 1 else "are"
    assert {one._waits.reason for one in others} == {
        f"{who} {verb} gone or stopped (no word for 1 s)"
    }


def test_nobody_is_silent_while_nobody_waits_or_all_wait_in_turn(begin: Begin, quick: None) -> None:
    """A rank that was stopped and goes on before others need it has cost nothing."""
    ranks = begin(3)
    until(lambda: all(one._heard for one in ranks))
    ranks[1].stop()
    wait, limit = 0, ranks[0]._beats + 60  # 3 s, three times as long as it takes to be named
    while ranks[0]._beats < limit:
        wait += 1
        ranks[0]._waits._open = ranks[2]._waits._open = {wait}  # each wait is over soon
        time.sleep(0.02)
    assert not any(one._waits.reason for one in ranks)
    wait_in(ranks, wait + 1)  # the control
    until(lambda: all(one._waits.reason for one in (ranks[0], ranks[2])))


def test_no_alarm_when_all_sleep_or_a_rank_has_left(
    begin: Begin, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A laptop's lid: it is counted by words, and nobody said any. And who has ended well is not
    waited for.
    """
    ranks = begin(3)
    until(lambda: all(one._heard for one in ranks))
    wait_in(ranks)
    ranks[1].leave()
    wake, tell = threading.Event(), Watch._tell
    monkeypatch.setattr(Watch, "_tell", lambda self, **more: (wake.wait(), tell(self, **more)))
    for one in (ranks[0], ranks[2]):
        one._is_rank0s = False  # its store sleeps too
    time.sleep(2)
    wake.set()
    limit = ranks[0]._beats + 40
    until(lambda: ranks[0]._beats >= limit)
    assert not any(one._waits.reason for one in ranks)


def test_a_rank_that_lives_and_says_nothing_is_waited_for(
    begin: Begin, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that lets no other thread run, such as of a library in C. This host sees that the
    process lives.
    """
    monkeypatch.setattr(watch, "HOST", "here")
    ranks = begin(2)
    until(lambda: all(one._heard for one in ranks))
    wait_in(ranks)
    ranks[1].stop()
    limit = ranks[0]._beats + 60
    until(lambda: ranks[0]._beats >= limit)
    assert not ranks[0]._waits.reason


@pytest.mark.skipif(not watch.HOST, reason="this system does not show the state of processes")
def test_the_state_of_a_process() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    words = {"host": watch.HOST, "pid": process.pid}
    assert watch._state(words) == "alive"
    process.send_signal(signal.SIGSTOP)
    until(lambda: watch._state(words) == "stopped")
    process.kill()
    until(lambda: watch._state(words) == "gone")  # it is there until its parent looks at it
    process.wait()
    assert watch._state(words) == "gone"
    assert watch._state({**words, "host": "another"}) == watch._state({}) == "gone or stopped"


def test_a_mistake_of_a_rank_ends_the_waits_of_others(begin: Begin, quick: None) -> None:
    """Those that wait for rank 0's long work have no connection that breaks."""
    ranks = begin(3)
    wait_in(ranks)
    ranks[0].end("the disk is full")
    until(lambda: all(one._waits.reason for one in ranks[1:]))
    assert {one._waits.reason for one in ranks[1:]} == {
        "rank 0 ended at step 7, vectors: the disk is full"
    }
