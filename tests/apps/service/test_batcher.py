from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparrow.apps.service import versions
from sparrow.apps.service.app import Service
from sparrow.apps.service.limits import Limits
from sparrow.apps.service.versions import Cost
from sparrow.extensions.tiers.serving import Ssd
from sparrow.extensions.tiers.serving.blocks import ROWS
from sparrow.serving import Scorer, load
from tests.apps.service.asking import Got, ask, counted, together
from tests.pace import Deadline

CLOSE = 1e-6  # products of other shapes sum in another order
OF_USER = ("user", "history", "tags", "num_1", "cat_0")

Request = dict[str, Any]


def request(
    rows: list[dict[str, Any]], at: list[int], of_user: tuple[str, ...] = OF_USER
) -> Request:
    """Some rows as candidates, of the user of the first one."""
    user = {name: rows[at[0]][name] for name in of_user} if at else {}
    return {
        "user": user,
        "candidates": [{n: v for n, v in rows[i].items() if n not in user} for i in at],
    }


def assert_scored(got: Got, scorer: Scorer, asked: Request) -> None:
    """It has the scores that the scorer alone gives."""
    assert got.status == 200, got.body
    want = scorer.rank(asked["user"], asked["candidates"])
    assert np.abs(np.array(got.json["scores"]["label"]) - want[:, 0]).max(initial=0) <= CLOSE
    assert got.json["version"] == scorer.folder.digest


def held(service: Service, monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, list[int]]:
    """Keep the scorer of a service busy until the event is set. Also gives the sizes of its batches
    from now on.
    """
    go, sizes, scorer, was = (
        threading.Event(),
        [],
        service.version.scorer,
        type(service.version.scorer).crossed,
    )

    def crossed(self: Scorer, asked: Any, *more: Any) -> Any:
        if self is scorer:
            sizes.append(len(asked))
            assert go.wait(60)
        return was(self, asked, *more)

    monkeypatch.setattr(type(scorer), "crossed", crossed)
    return go, sizes


def waits(
    service: Service,
    requests: list[tuple[str, Any]],
    held: tuple[threading.Event, list[int]],
    count: int,
    refused: int = 0,
) -> list[Got]:
    """The answers to requests of which `count` have waited in the queue at once, behind the first
    one.

    Others have been refused with 429 before any was scored.
    """
    go, sizes = held

    def let_go() -> None:
        deadline = Deadline(30)
        full = service.metrics.requests.labels("/rank", "429")._value
        while (len(service.batcher._queue) < count or full.get() < refused) and not deadline.over:
            time.sleep(0.002)
        go.set()

    thread = threading.Thread(target=let_go)
    thread.start()
    got = together(service, requests, sizes)
    thread.join()
    return got


places = st.lists(st.integers(0, 99), max_size=8)
columns = st.sampled_from([OF_USER, (), ("user",), OF_USER[:3]])


@settings(max_examples=25, suppress_health_check=list(HealthCheck), deadline=None)
@given(asked=st.lists(st.tuples(places, columns), min_size=1, max_size=12), bad=st.integers(-8, 11))
def test_requests_together_are_requests_alone(
    asked: list[tuple[list[int], tuple[str, ...]]],
    bad: int,
    rows: list[dict[str, Any]],
    scorer: Scorer,
    serve: Callable[..., Service],
) -> None:
    """Beside others, and beside one that cannot be scored, which fails alone."""
    service, given = serve(threads=2), [request(rows, at, of_user) for at, of_user in asked]
    sent = [("/rank", dict(one)) for one in given]
    if 0 <= bad < len(given) and given[bad]["candidates"]:
        broken = [row | {"num_0": "much"} for row in given[bad]["candidates"]]
        sent[bad] = ("/rank", given[bad] | {"candidates": broken})
    for number, (one, got) in enumerate(zip(given, together(service, sent), strict=True)):
        if not one["candidates"]:
            assert got.status == 200 and got.json["scores"] == {"label": []}
        elif number == bad:
            assert (
                got.status == 400
                and "column 'num_0', row 0: 'much' is no number" in got.json["error"]
            )
        else:
            assert_scored(got, scorer, one)


def test_a_free_scorer_takes_all_that_wait(
    service: Service, scorer: Scorer, rows: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of one kind together; of another kind in another batch."""
    go, sizes = held(service, monkeypatch)
    kinds = [OF_USER, OF_USER, ("user",), OF_USER, ("user",)]
    given = [request(rows, [0, 1], of) for of in kinds]
    got = waits(service, [("/rank", one) for one in given], (go, sizes), 4)
    monkeypatch.undo()
    assert sizes[0] == 1 and sorted(sizes[1:]) == [2, 2]
    for one, answer in zip(given, got, strict=True):
        assert_scored(answer, scorer, one)


def test_requests_whose_rows_would_share_a_scale_are_scored_alone(
    mixed: Scorer,
    serve: Callable[..., Service],
    rows: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a service and in Python. Beside each other they have other scores."""
    given = [request(rows, list(range(at, at + 20))) for at in (0, 20, 40, 60)]
    asked = [(one["user"], one["candidates"]) for one in given]
    alone = [mixed.rank(*one) for one in asked]
    beside = mixed.ranked(mixed.crossed(asked))
    assert max(np.abs(a - b).max() for a, b in zip(alone, beside, strict=True)) > 1e-4
    assert all(np.array_equal(a, b) for a, b in zip(alone, mixed.rank_all(asked), strict=True))
    service = serve(of=mixed)
    go, sizes = held(service, monkeypatch)
    got = waits(service, [("/rank", dict(one)) for one in given], (go, sizes), 3)
    monkeypatch.undo()
    assert sizes == [1, 1, 1, 1]
    for one, answer in zip(given, got, strict=True):
        assert_scored(answer, mixed, one)
    refused = ask(service, "/explain/0", given[0])
    assert refused.status == 400 and "share a scale" in refused.json["error"]


def test_a_batch_keeps_to_what_its_oldest_can_wait(
    service: Service, rows: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    go, sizes = held(service, monkeypatch)
    # two candidates take 14 s, four 22 s
    service.version.cost.fixed_s, service.version.cost.candidate_s = 6.0, 4.0
    monkeypatch.setattr(service.version.cost, "correct", lambda n, seconds: None)
    one = request(rows, [0, 1])
    got = waits(service, [("/rank", one | {"deadline_ms": 20_000})] * 3, (go, sizes), 2)
    assert sizes == [1, 1, 1] and {answer.status for answer in got} == {200}


def test_who_would_wait_too_long_is_refused_at_once(
    service: Service, rows: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the time is spared. One that comes to an empty queue is tried, however long it
    takes.
    """
    go, sizes = held(service, monkeypatch)
    # each adds 8 s to those before it
    service.version.cost.fixed_s, service.version.cost.candidate_s = 6.0, 4.0
    monkeypatch.setattr(service.version.cost, "correct", lambda n, seconds: None)
    one = request(rows, [0, 1]) | {"deadline_ms": 20_000}
    threading.Timer(1.0, go.set).start()
    got = together(
        service, [("/rank", one)] * 2 + [("/rank", one | {"deadline_ms": 10_000})], sizes
    )
    assert [answer.status for answer in got] == [200, 200, 503] and got[2].headers[
        b"retry-after"
    ] == b"1"
    assert "deadline: 1 requests wait, which take 8000 ms; try again later" in got[2].json["error"]


def test_large_requests_do_not_wait_for_each_other(
    scorer: Scorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    cost = Cost(fixed_s=300e-6, candidate_s=5e-6)
    assert cost.is_worth(500) and not cost.is_worth(1000)
    # seconds; three of four tries are stalled
    now, stalls = [0.0], iter([1.0, 0.5, 0.5, 0.0] * 100)

    def score(asked: dict[str, list[Any]]) -> None:
        now[0] += cost(len(next(iter(asked.values())))) + next(stalls)

    monkeypatch.setattr(versions, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    found = versions._measure_cost(
        cast(Scorer, SimpleNamespace(folder=scorer.folder, encoder=scorer.encoder, score=score))
    )
    assert [found.fixed_s, found.candidate_s] == pytest.approx(
        [cost.fixed_s, cost.candidate_s], rel=1e-6
    )
    # others do not count
    monkeypatch.setattr(versions, "time", SimpleNamespace(perf_counter=time.process_time))
    cost = versions._measure_cost(scorer)
    assert cost.is_worth(1) and not cost.is_worth(100_000)


def test_a_request_past_its_deadline_is_not_scored(
    service: Service, rows: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    go, sizes = held(service, monkeypatch)
    one = request(rows, [0])
    threading.Timer(0.5, go.set).start()
    got = together(service, [("/rank", one), ("/rank", one | {"deadline_ms": 100})], sizes)
    assert [answer.status for answer in got] == [200, 503] and sizes == [1]
    assert (
        got[1].headers[b"retry-after"] == b"1" and "deadline: passed after" in got[1].json["error"]
    )


def test_what_does_not_fit_the_queue_is_refused(
    serve: Callable[..., Service],
    scorer: Scorer,
    rows: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    service = serve(Limits(deadline_ms=60_000, queue=3))
    go, sizes = held(service, monkeypatch)
    one = request(rows, [0])
    got = waits(service, [("/rank", one)] * 20, (go, sizes), 3, refused=16)
    monkeypatch.undo()
    statuses = [answer.status for answer in got]
    assert statuses.count(200) == 4 and statuses.count(429) == 16
    assert "3 requests wait, which is the most; try again later" in got[-1].json["error"]
    assert got[-1].headers[b"retry-after"] == b"1"
    assert_scored(ask(service, "/rank", one), scorer, one)


def test_a_fault_of_the_service_is_no_traceback(
    service: Service,
    rows: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def crossed(self: Scorer, asked: Any, *more: Any) -> Any:
        raise RuntimeError("secret")

    monkeypatch.setattr(type(service.version.scorer), "crossed", crossed)
    got = ask(service, "/rank", request(rows, [0]))
    assert got.status == 500 and b"secret" not in got.body and "secret" in caplog.text


def test_closing_finishes_what_waits(
    service: Service, scorer: Scorer, rows: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    go, sizes = held(service, monkeypatch)
    closing = threading.Thread(target=service.batcher.close)

    def close() -> None:
        deadline = Deadline(30)
        while sum(sizes) + len(service.batcher._queue) < 5 and not deadline.over:
            time.sleep(0.002)
        closing.start()
        time.sleep(0.1)  # in which it begins, most times
        go.set()

    thread = threading.Thread(target=close)
    thread.start()
    given = [request(rows, [i]) for i in range(5)]
    got = together(service, [("/rank", one) for one in given])
    thread.join()
    monkeypatch.undo()
    for one, answer in zip(given, got, strict=True):
        assert_scored(answer, scorer, one)
    closing.join()
    assert ask(service, "/rank", given[0]).status == 429


@pytest.mark.skipif(
    not hasattr(time, "pthread_getcpuclockid"), reason="the system has no clocks of threads"
)
def test_a_thread_that_does_nothing_at_a_batch_is_stuck(
    service: Service, scorer: Scorer, rows: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that computes is not, however long its batch takes, nor is one without a batch."""
    go, spin, batcher, seen = threading.Event(), threading.Event(), service.batcher, list[str]()
    crossed = type(scorer).crossed

    def slow(*given: Any) -> Any:
        while spin.is_set():
            pass
        assert go.wait(60)
        return crossed(*given)

    def look() -> None:
        while not batcher._batches[0]:
            time.sleep(0.01)
        batcher.is_stuck()
        for _ in range(5):
            begun = time.clock_gettime(batcher._clocks[0] or 0)
            while time.clock_gettime(batcher._clocks[0] or 0) == begun:
                time.sleep(0.01)
            seen.append(f"computes {batcher.is_stuck()}")
        spin.clear()
        while not batcher.is_stuck():
            time.sleep(0.05)
        seen.append("waits")
        go.set()

    monkeypatch.setattr(type(scorer), "crossed", slow)
    spin.set()
    assert not batcher.is_stuck() and not batcher.is_stuck()
    looking = threading.Thread(target=look)
    looking.start()
    one = request(rows, [0])
    assert_scored(ask(service, "/rank", one), scorer, one)
    looking.join()
    while batcher._batches[0]:  # its thread answers before it looks for the next one
        time.sleep(0.01)
    assert (
        seen == ["computes False"] * 5 + ["waits"]
        and not batcher.is_stuck()
        and not batcher.is_stuck()
    )


def test_who_cannot_be_counted_is_answered(
    service: Service,
    scorer: Scorer,
    rows: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def full(*_: Any) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(service.metrics, "count_scores", full)
    one = request(rows, [0, 1])
    for _ in range(2):
        assert_scored(ask(service, "/rank", one), scorer, one)
    assert "could not be counted" in caplog.text


def test_a_bad_block_fails_its_own_requests(
    serve: Callable[..., Service], models: Path, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    """Requests that share a batch with them are scored, and none gets a wrong score."""
    ssd = Ssd(
        folder=tmp_path,
        least_mb=0.0,
        cache_mb=0.0,
        in_memory=("item", "tags", "cat_0", "cat_1", "cat_2"),
    )
    scorer, held_all = load(models / "one", ssd=ssd), load(models / "one")
    service = serve(of=scorer)
    (cached,) = scorer.on_ssd[0].cached.values()
    path = cached.place / ROWS
    whole = path.read_bytes()
    path.write_bytes(bytes(byte ^ 1 if at % 4096 == 100 else byte for at, byte in enumerate(whole)))
    users = [int(scorer.encoder.batch([row]).ids["user"].values_N[0]) for row in rows]
    is_known = [user in cached.cache.rows_F.tolist() for user in users]
    fine, bad = request(rows, [is_known.index(True)]), request(rows, [is_known.index(False)])
    got = together(service, [("/rank", one) for one in [fine, bad] * 3])
    assert [answer.status for answer in got] == [200, 503] * 3
    for answer in got[::2]:
        assert_scored(answer, held_all, fine)
    assert "cannot be read" in got[1].json["error"] and str(tmp_path) not in got[1].json["error"]
    assert got[1].headers[b"retry-after"] == b"1"
    path.write_bytes(whole)
    assert_scored(ask(service, "/rank", bad), held_all, bad)
    told = counted(service)
    for what, count in cached.counters.items():
        assert f'sparrow_ssd_total{{table="user",what="{what}"}} {count}.0' in told
