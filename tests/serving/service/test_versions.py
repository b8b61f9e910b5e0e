from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from sparrow.core.errors import UserError
from sparrow.serving import load
from sparrow.serving.service.versions import Cost, Versions


def test_a_cost_follows_what_batches_take() -> None:
    cost = Cost(1e-3, 1e-5)
    assert cost(100) == pytest.approx(2e-3)
    for _ in range(100):
        cost.seen(100, 4e-3)
    assert cost(100) == pytest.approx(4e-3, rel=1e-3)
    cost.seen(100, 1000.0)  # a stall
    assert cost(100) < 7e-3


def test_a_swap_waits_for_the_last_answer_of_the_old_version(models: Path) -> None:
    versions = Versions(load(models / "one"))
    old, done = versions.hold(2), []
    thread = threading.Thread(target=lambda: done.append(versions.swap(models / "two")))
    thread.start()
    end = time.monotonic() + 60
    while versions.current is old and time.monotonic() < end:
        time.sleep(0.01)
    with pytest.raises(UserError, match="another model is being loaded; try again"):
        versions.swap(models / "one")
    versions.release(old)
    time.sleep(0.1)
    assert not done
    versions.release(old)
    thread.join()
    assert done == [versions.current] and versions.current.name == load(models / "two").folder.digest


def test_a_swap_to_itself_and_a_delta_again_change_nothing(models: Path) -> None:
    versions = Versions(load(models / "one", [models / "delta"]))
    before = versions.current
    assert versions.swap(models / "delta") is before is versions.current
