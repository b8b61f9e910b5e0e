from __future__ import annotations

import gc
import shutil
import threading
import time
import weakref
from pathlib import Path

import pytest

from sparrow.apps.service.versions import Cost, Model, Versions, stack_paths
from sparrow.core.errors import UserError
from sparrow.serving import load
from tests.pace import Deadline


def test_a_cost_follows_what_batches_take() -> None:
    cost = Cost(1e-3, 1e-5)
    assert cost(100) == pytest.approx(2e-3)
    for _ in range(100):
        cost.correct(100, 4e-3)
    assert cost(100) == pytest.approx(4e-3, rel=1e-3)
    cost.correct(100, 1000.0)  # a stall
    assert cost(100) < 7e-3


def model(*folders: Path) -> Model:
    return Model(tuple(map(str, folders)))


def test_a_flip_waits_for_the_last_answer_of_the_old_version(models: Path) -> None:
    versions = Versions(load(models / "one"))
    old, done = versions.hold(2), []
    versions.prepare(model(models / "two"))
    assert versions.current is old
    thread = threading.Thread(target=lambda: done.append(versions.flip(model(models / "two"))))
    thread.start()
    deadline = Deadline(60)
    while versions.current is old and not deadline.over:
        time.sleep(0.01)
    versions.release(old)
    time.sleep(0.1)
    assert not done
    versions.release(old)
    thread.join()
    assert (
        done == [versions.current] and versions.current.name == load(models / "two").folder.digest
    )


def test_a_flip_prepares_what_was_not_and_changes_nothing_for_the_same(models: Path) -> None:
    versions = Versions(load(models / "one"))
    first = versions.current
    assert versions.flip(first.model) is first
    versions.prepare(model(models / "two"))
    versions.prepare(first.model)  # so that none is kept
    second = versions.flip(model(models / "one", models / "delta"))
    assert second.model.paths == model(models / "one", models / "delta").paths
    want = load(models / "one", [models / "delta"])
    row = want.golden_rows()[1][0]
    assert (second.scorer.score([row]) == want.score([row])).all()
    # the rows of the full folder stay mapped
    assert second.scorer.stack.folders[0] is first.scorer.stack.folders[0]


def test_an_old_version_goes_with_its_last_reader(models: Path) -> None:
    versions = Versions(load(models / "one"))
    old = weakref.ref(versions.current.scorer)
    held = versions.hold(0)
    versions.flip(model(models / "two"))
    gc.collect()
    assert old() is held.scorer
    del held
    gc.collect()
    assert old() is None


def test_what_is_asked_for_is_a_stack_of_folders(models: Path, tmp_path: Path) -> None:
    one, delta = str(models / "one"), str(models / "delta")
    assert stack_paths((one,), [delta]) == (one, delta) == stack_paths((one, delta), [delta])
    assert stack_paths((one, delta), [one]) == (one,)
    assert stack_paths((one, delta), [one, delta]) == (one, delta)
    absent = str(tmp_path / "absent")
    assert stack_paths((one, delta), [absent]) == (absent,)


def test_another_model_at_the_same_path_is_another_version(models: Path, tmp_path: Path) -> None:
    """And what has changed since it was checked is refused."""
    place = tmp_path / "model"
    shutil.copytree(models / "one", place)
    versions, two = Versions(load(place)), load(models / "two")
    shutil.rmtree(place)
    shutil.copytree(models / "two", place)
    assert versions.flip(model(place)._replace(version=two.folder.digest)).name == two.folder.digest
    row = two.golden_rows()[1][0]
    assert (versions.current.scorer.score([row]) == two.score([row])).all()
    with pytest.raises(UserError, match="model: has changed since it was checked"):
        versions.prepare(model(place)._replace(version="another"))


def test_what_was_written_to_since_it_was_checked_is_read_again(
    models: Path, tmp_path: Path
) -> None:
    """Of a full folder and of a delta: what is no longer itself is refused."""
    for name, below in (("two", ()), ("delta", (models / "one",))):
        place = tmp_path / name
        shutil.copytree(models / name, place)
        folders = (*below, place)
        checked = load(folders[0], folders[1:]).stack.checked
        table = place / "tables" / "user.safetensors"
        right = table.read_bytes()
        table.write_bytes(right[:-1] + bytes([right[-1] ^ 1]))
        versions, wanted = Versions(load(models / "one")), model(*folders)
        with pytest.raises(UserError, match=r"user.safetensors: damaged \(its checksum differs\)"):
            versions.flip(wanted, checked)
        table.write_bytes(right)
        assert versions.flip(wanted, checked).model.paths == wanted.paths
