from __future__ import annotations

import gc
import threading
import time
import weakref
from pathlib import Path

import pytest

from sparrow.serving import load
from sparrow.serving.service.versions import Cost, Versions, stacked


def test_a_cost_follows_what_batches_take() -> None:
    cost = Cost(1e-3, 1e-5)
    assert cost(100) == pytest.approx(2e-3)
    for _ in range(100):
        cost.seen(100, 4e-3)
    assert cost(100) == pytest.approx(4e-3, rel=1e-3)
    cost.seen(100, 1000.0)  # a stall
    assert cost(100) < 7e-3


def paths(*folders: Path) -> tuple[str, ...]:
    return tuple(map(str, folders))


def test_a_flip_waits_for_the_last_answer_of_the_old_version(models: Path) -> None:
    versions = Versions(load(models / "one"))
    old, done = versions.hold(2), []
    versions.prepare(paths(models / "two"))
    assert versions.current is old
    thread = threading.Thread(target=lambda: done.append(versions.flip(paths(models / "two"))))
    thread.start()
    end = time.monotonic() + 60
    while versions.current is old and time.monotonic() < end:
        time.sleep(0.01)
    versions.release(old)
    time.sleep(0.1)
    assert not done
    versions.release(old)
    thread.join()
    assert done == [versions.current] and versions.current.name == load(models / "two").folder.digest


def test_a_flip_prepares_what_was_not_and_changes_nothing_for_the_same(models: Path) -> None:
    versions = Versions(load(models / "one"))
    first = versions.current
    assert versions.flip(first.paths) is first
    versions.prepare(paths(models / "two"))
    versions.prepare(first.paths)  # so that none is kept
    second = versions.flip(paths(models / "one", models / "delta"))
    assert second.paths == paths(models / "one", models / "delta")
    want = load(models / "one", [models / "delta"])
    row = want.kept()[1][0]
    assert (second.scorer.score([row]) == want.score([row])).all()
    assert second.scorer.stack.folders[0] is first.scorer.stack.folders[0]  # the rows of the full folder stay mapped


def test_an_old_version_goes_with_its_last_reader(models: Path) -> None:
    versions = Versions(load(models / "one"))
    old = weakref.ref(versions.current.scorer)
    held = versions.hold(0)
    versions.flip(paths(models / "two"))
    gc.collect()
    assert old() is held.scorer
    del held
    gc.collect()
    assert old() is None


def test_what_is_asked_for_is_a_stack_of_folders(models: Path, tmp_path: Path) -> None:
    one, delta = str(models / "one"), str(models / "delta")
    assert stacked((one,), [delta]) == (one, delta) == stacked((one, delta), [delta])
    assert stacked((one, delta), [one]) == (one,)
    assert stacked((one, delta), [one, delta]) == (one, delta)
    absent = str(tmp_path / "absent")
    assert stacked((one, delta), [absent]) == (absent,)
