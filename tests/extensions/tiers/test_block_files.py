"""Checkpoints of tables on an SSD: maps of blocks that they share, whatever comes between."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any

import pytest
import safetensors.torch
import torch

from sparrow import checkpoint, data
from sparrow.apps.generate import generate
from sparrow.checkpoint import store
from sparrow.core import UserError
from sparrow.extensions.tiers import block_files as of_run
from sparrow.extensions.tiers import claims, pieces
from sparrow.extensions.tiers.frames import tier_frames
from sparrow.extensions.tiers.stores import saved as of_saved
from sparrow.extensions.tiers.stores import spare
from sparrow.extensions.tiers.stores import ssd as of_ssd
from sparrow.extensions.tiers.stores.cached import ssd_of
from sparrow.extensions.tiers.stores.ssd import SsdStore, queue_bytes
from sparrow.kernels.block_io import Blocks
from sparrow.kernels.row_cache.policies import lfu
from sparrow.serving.deltas import compact
from sparrow.serving.export import export
from sparrow.trained.build import tables_of
from sparrow.trained.scorer import restore
from sparrow.training.loop import Trainer
from sparrow.training.saver import Saver
from tests.extensions.tiers.stores.test_stacked import counted
from tests.runs import run_of
from tests.serving.test_export import contents

SETTINGS: dict[str, Any] = {
    "data.batch_size": 16,
    "model.dim": 8,
    "model.deep": [16],
    "data.id_dropout": {},
    "loop.max_steps": 60,
    "loop.evaluate_every": 12,
    "checkpoint.every": 5,
    "checkpoint.keep": 2,
    "schedule.decay": "constant",
    "threads": 1,
    "log.tensorboard": False,
    "tables.tier.fraction": 0.2,
}


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log with more ids than frames."""
    path = tmp_path_factory.mktemp("wide") / "log.parquet"
    generate(path, rows=3000, users=900, items=1500, categorical=2, numeric=2, seed=5)
    data.prepare([path], path.parent / "prepared")
    return path.parent / "prepared"


def trainer(prepared: Path, place: Path, **options: Any) -> Trainer:
    """A run in place/run, on an SSD unless its tier says otherwise."""
    how = {
        name: options.pop(name) for name in ("resume", "overwrite", "listener") if name in options
    }
    chosen = {"tables.tier.name": "ssd", "tiers.folder": str(place / "disk")} | {
        n.replace("__", "."): v for n, v in options.items()
    }
    return Trainer(run_of(str(prepared), str(place / "run"), **SETTINGS | chosen), **how)


def rows_of(saved: checkpoint.Checkpoint) -> dict[str, str]:
    """What a checkpoint has of each field of each table, and of all else."""
    found: dict[str, Any] = {}
    for chunk in saved.chunks():
        for name, tensor in chunk.fields.items():
            digest = found.setdefault(f"{chunk.table} {name}", sha256())
            digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
    parts = {
        name: entry["sha256"]
        for name, entry in saved.files.items()
        if name.split(".")[0] in ("dense", "optimizer", "random")
    }
    return parts | {of: digest.hexdigest() for of, digest in found.items()}


def last(place: Path) -> checkpoint.Checkpoint:
    """Its last checkpoint."""
    return checkpoint.load(place / "run" / "checkpoints")


def files(place: Path) -> set[Path]:
    """The files of blocks that there are."""
    return set((place / "disk").rglob("*.blocks"))


def needed(place: Path) -> set[Path]:
    """Those that checkpoints need."""
    found = place / "run" / "checkpoints"
    return {
        Path(path)
        for step in checkpoint.steps(found)
        for path in checkpoint.load(found, step).block_files
    }


@pytest.fixture(scope="module")
def in_memory(wide: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, str]]:
    """The rows of each checkpoint of the run with all in memory, by step."""
    place, found = tmp_path_factory.mktemp("memory"), {}
    patch = pytest.MonkeyPatch()
    with patch.context() as patched:
        patched.setattr(store, "_prune", lambda directory, keep, best_step: None)
        trainer(wide, place, tables__tier__name="memory").fit()
    for step in checkpoint.steps(place / "run" / "checkpoints"):
        found[step] = rows_of(checkpoint.load(place / "run" / "checkpoints", step))
    return found


def check(place: Path, want: dict[int, dict[str, str]]) -> None:
    """That all its checkpoints are whole."""
    found = place / "run" / "checkpoints"
    for step in checkpoint.steps(found):
        assert rows_of(checkpoint.load(found, step)) == want[step], step


def newer(part: of_saved.Saved) -> int:
    """How many newer rows a checkpoint has beside its blocks."""
    return int((part.field(of_saved.ROW, 0, part.bounds[-1]) >= 0).sum())


def check_sizes(place: Path) -> None:
    """That places are used again: of three or four checkpoints that are kept, and of what is
    written beside.
    """
    for part in last(place).external():
        assert part.path.stat().st_size <= 4096 * (1 + 16 + 5 * part.layout.blocks)


def test_kept_checkpoints_share_one_file(
    wide: Path, tmp_path: Path, in_memory: dict[int, dict[str, str]]
) -> None:
    """Each has the rows of its step, though most blocks were written again since; nothing but
    frames is copied.
    """
    trainer(wide, tmp_path).fit()
    check(tmp_path, in_memory)
    assert len(checkpoint.steps(tmp_path / "run" / "checkpoints")) == 3  # the best and the last two
    assert files(tmp_path) == needed(tmp_path) and len(files(tmp_path)) == 5
    saved = last(tmp_path)
    assert not [name for name in saved.files if name.startswith("table-")]
    for part in saved.external():
        frames, spare = tier_frames(part.component, part.component.rows)
        waiting = queue_bytes(part.component, part.component.rows) // part.component.bytes_row
        assert newer(part) <= frames + spare + waiting


def test_a_run_goes_on_with_its_file(
    wide: Path, tmp_path: Path, in_memory: dict[int, dict[str, str]]
) -> None:
    trainer(wide, tmp_path, loop__max_steps=25).fit()
    before = files(tmp_path)
    again = trainer(wide, tmp_path, loop__max_steps=25, resume=True)
    with again.callbacks.open():
        again.checkpointer.load(last(tmp_path))
        stores = {
            r.component.name: r.store for tables in again.job.tables for r in tables.all_records()
        }
        held = 0
        # frames that stood by, and rows that waited, may have no frame now
        for part in last(tmp_path).external():
            of = stores[part.component.name]
            assert isinstance(of, SsdStore)
            held += (mine := int((of.frames.tags_F >= 0).sum()))
            assert of.counters["blocks_written"] <= newer(part) - mine
        assert held > 200
    for steps in (35, 60):
        trainer(wide, tmp_path, loop__max_steps=steps, resume=True).fit()
        check(tmp_path, in_memory)
        assert files(tmp_path) == before == needed(tmp_path)
    check_sizes(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        "folder",
        "lfu",
        "copy",
        "memory",
        *(pytest.param(c, marks=pytest.mark.slow) for c in ("seed", "frames")),
    ],
)
def test_a_run_goes_on_elsewhere(
    wide: Path,
    tmp_path: Path,
    in_memory: dict[int, dict[str, str]],
    change: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From a file that it cannot go on with it reads. The old one goes with the last checkpoint
    that needs it.
    """
    place = tmp_path
    choices: dict[str, dict[str, Any]] = {
        "folder": {"tiers.folder": str(tmp_path / "disk" / "other")},
        "seed": {"tables__seed": 7},
        "frames": {"tables__tier__fraction": 0.1},
        "lfu": {"tables__tier__fraction": 0.1, "tables__tier__policy": "lfu"},
        "copy": {},
        "memory": {"tables__tier__name": "memory"},
    }
    options = choices[change]
    monkeypatch.setattr(of_ssd, "PIECE", 32)  # rows of later pieces find full sets
    trainer(wide, place, loop__max_steps=25).fit()
    before = files(place)
    if change == "copy":
        (tmp_path / "copied").mkdir()
        shutil.copytree(place / "run", tmp_path / "copied" / "run")
        place = tmp_path / "copied"
        options["tiers.folder"] = str(tmp_path / "disk")
    trainer(wide, place, resume=True, **options).fit()
    check(place, in_memory)
    used = {Path(path) for path in last(place).block_files}
    assert used == before if change in ("frames", "lfu") else not used & before
    assert len(used) == 5 * (change != "memory")
    check(tmp_path, in_memory)
    assert files(tmp_path) == needed(tmp_path) | needed(place)


def test_files_of_an_overwritten_run_go(
    wide: Path, tmp_path: Path, in_memory: dict[int, dict[str, str]]
) -> None:
    trainer(wide, tmp_path, loop__max_steps=25, seed=3).fit()
    before = files(tmp_path)
    trainer(wide, tmp_path, overwrite=True).fit()
    check(tmp_path, in_memory)
    assert files(tmp_path) == needed(tmp_path) and not before & files(tmp_path)


def test_files_of_a_run_that_is_given_up_go(wide: Path, tmp_path: Path) -> None:
    trainer(wide, tmp_path, loop__max_steps=10).fit()
    assert files(tmp_path)
    of_run.forget(tmp_path / "run")
    of_run.forget(tmp_path / "none")
    assert not list((tmp_path / "disk").iterdir())


def test_what_a_killed_auto_has_left_goes_with_the_next_training(
    wide: Path, tmp_path: Path
) -> None:
    """Its short run is in a hidden folder with a lock that nobody holds any more. What others are
    at stays.
    """
    for name in ("killed12", "working1"):
        trainer(
            wide, tmp_path / f".run.{name}", tiers__folder=str(tmp_path / "disk"), loop__max_steps=5
        ).fit()
        (tmp_path / f".run.{name}" / "sparrow-prepare.lock").touch()
    working = set(checkpoint.load(tmp_path / ".run.working1" / "run" / "checkpoints").block_files)
    with open(tmp_path / ".run.working1" / "sparrow-prepare.lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        trainer(wide, tmp_path, loop__max_steps=5).fit()
    assert {path.name for path in tmp_path.iterdir()} == {".run.working1", "run", "disk"}
    assert files(tmp_path) == needed(tmp_path) | {Path(path) for path in working}


def damage(change: Callable[[Path], Any]) -> Callable[[Path, checkpoint.Checkpoint], None]:
    def do(place: Path, saved: checkpoint.Checkpoint) -> None:
        change(max(saved.external(), key=lambda part: int((part.map.places_K > 0).sum())).path)

    return do


def other_run(place: Path, saved: checkpoint.Checkpoint) -> None:
    one, two = sorted(saved.block_files)[:2]
    shutil.copy(one, two)


def file_of(kind: str) -> Callable[[Path, checkpoint.Checkpoint], None]:
    def do(place: Path, saved: checkpoint.Checkpoint) -> None:
        path = next(saved.path / name for name in saved.files if name.startswith(kind))
        path.write_bytes(path.read_bytes()[:-1] + b"\7")

    return do


@pytest.mark.parametrize(
    ("how", "told"),
    [
        (damage(os.unlink), r"^table \w+: .*\.blocks is missing; bring it back to there, or go back"),
        (damage(lambda path: os.truncate(path, 4096)), r"^table \w+: .*\.blocks is cut: .*; bring back the whole file"),
        (damage(lambda path: path.write_bytes(b"\0" * 4096 + path.read_bytes()[4096:])), ": .* is no file of blocks"),
        (damage(lambda path: path.write_bytes(path.read_bytes()[:4096] + b"\1" * (path.stat().st_size - 4096))),
         r"^table \w+, rows \d+ to \d+: .*\.blocks is damaged \(the checksum of block"),
        (other_run, r"^table \w+: .*\.blocks is of another run; bring back the one of this checkpoint"),
        (file_of("blocks"), r"blocks-\w+-0+-0+\.safetensors: damaged checkpoint \(its checksum differs\); delete the "),
        (file_of("newer"), r"newer-\w+-0+-0+\.safetensors: damaged checkpoint \(its checksum differs\); delete the "),
    ],
)  # fmt: skip
def test_files_that_are_damaged(
    wide: Path, tmp_path: Path, in_memory: dict[int, dict[str, str]], how: Any, told: str
) -> None:
    trainer(wide, tmp_path, loop__max_steps=25).fit()
    how(tmp_path, last(tmp_path))
    with pytest.raises(UserError, match=told) as error:
        list(last(tmp_path).chunks())
    assert "\n" not in str(error.value)
    with pytest.raises(UserError, match=told):  # at the latest when rows are read
        for tables in tables_of(restore(tmp_path / "run", which="last").model):
            list(tables.chunks())
    with pytest.raises(UserError, match=told):
        trainer(wide, tmp_path, resume=True).fit()
    if "delete the" in told:  # so it goes on from the one before
        shutil.rmtree(last(tmp_path).path)
        trainer(wide, tmp_path, resume=True, loop__max_steps=25).fit()
        check(tmp_path, in_memory)
        assert last(tmp_path).step == 25


@pytest.mark.parametrize("find_frames", [True, False])
def test_who_does_not_train_reads_rows_where_they_lie(
    wide: Path, tmp_path: Path, find_frames: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is written, unless newer rows find no frames; then there is a file that goes away.
    Scores are those.
    """
    trainer(wide, tmp_path, loop__max_steps=25).fit()
    if not find_frames:
        monkeypatch.setattr(spare.Spare, "free", 0)
    before = {path: path.read_bytes() for path in files(tmp_path)}
    found = {which: restore(tmp_path / "run", which=which) for which in ("last", "best")}
    for which, restored in found.items():
        records = [r for tables in tables_of(restored.model) for r in tables.all_records()]
        stores = [record.store for record in records if isinstance(record.store, SsdStore)]
        assert len(stores) == 5
        written = sum(store.counters["blocks_written"] for store in stores)
        assert (written == 0) == find_frames
        saved = checkpoint.load(tmp_path / "run" / "checkpoints", restored.step)
        place = [(r.component.name, (0, r.rows), (0, r.dim)) for r in records]
        want = {(c.table, c.rows): c for c in saved.chunks(place)}
        for record in records:
            for chunk in record.chunks(1 << 30):
                assert chunk.fields.keys() == want[chunk.table, chunk.rows].fields.keys()
                for name, of in chunk.fields.items():
                    assert torch.equal(of, want[chunk.table, chunk.rows].fields[name]), (
                        which,
                        name,
                    )
    assert {path: path.read_bytes() for path in files(tmp_path)} == before


def test_a_copy_at_the_same_path_has_files_of_its_own(wide: Path, tmp_path: Path) -> None:
    """As in a container, where it may see the folder of the first. A run that was moved keeps its
    own.
    """
    trainer(wide, tmp_path, loop__max_steps=5).fit()
    before = files(tmp_path)
    (tmp_path / "run").rename(tmp_path / "moved")
    (tmp_path / "moved").rename(tmp_path / "run")
    trainer(wide, tmp_path, resume=True, loop__max_steps=10).fit()
    assert files(tmp_path) == before
    (tmp_path / "run").rename(tmp_path / "first")
    shutil.copytree(tmp_path / "first", tmp_path / "run")
    trainer(wide, tmp_path, resume=True, loop__max_steps=15).fit()
    assert before < files(tmp_path) and not before & {
        Path(path) for path in last(tmp_path).block_files
    }


def go_on(wide: Path, place: Path, steps: int, **options: Any) -> list[str]:
    """Train place/run up to some steps, with files in the `disk` that all places share. Returns
    what is said of it.
    """
    notes: list[str] = []

    def listen(event: str, values: dict[str, Any]) -> None:
        notes.extend([values["text"]] if event == "note" else [])

    disk = str(place.parent / "disk")
    trainer(
        wide, place, tiers__folder=disk, loop__max_steps=steps, listener=listen, **options
    ).fit()
    return [note for note in notes if "is a copy, or was restored" in note]


def blocks_of(place: Path) -> set[Path]:
    """The files that its last checkpoint needs."""
    return {Path(path) for path in last(place).block_files}


@pytest.mark.parametrize(
    "first",
    [
        "moved",
        *(pytest.param(way, marks=pytest.mark.slow) for way in ("removed", "on another disk")),
    ],
)
def test_two_directories_never_share_blocks(
    wide: Path, tmp_path: Path, in_memory: dict[int, dict[str, str]], first: str
) -> None:
    """A directory was copied twice, and the first one is gone, elsewhere, or has another inode. All
    go on in turn.
    """
    a, b, c = (tmp_path / name for name in "abc")
    go_on(wide, a, 20)
    before = blocks_of(a)
    shutil.copytree(a, b)
    if first == "moved":
        a.rename(c)
    else:
        shutil.copytree(a, c)
        shutil.rmtree(a)
    assert len(go_on(wide, b, 30, resume=True)) == 1
    assert len(go_on(wide, c, 35, resume=True)) == (first != "moved")
    assert (blocks_of(c) == before) == (first == "moved") and not blocks_of(b) & (
        before | blocks_of(c)
    )
    for steps in (40, 50):  # each has its own from now on
        mine = [blocks_of(place) for place in (b, c)]
        assert not go_on(wide, b, steps, resume=True) and not go_on(wide, c, steps, resume=True)
        assert [blocks_of(place) for place in (b, c)] == mine
        check(b, in_memory)
        check(c, in_memory)


def test_a_snapshot_has_the_inode_of_the_first(
    wide: Path, tmp_path: Path, in_memory: dict[int, dict[str, str]]
) -> None:
    """As a clone of a disk has. Whoever goes on first has the files, and the other one gets its
    own.
    """
    a, b = tmp_path / "a", tmp_path / "b"
    go_on(wide, a, 20)
    before = blocks_of(a)
    shutil.copytree(a, b)
    note = claims.read_note(b / "run")
    assert note is not None
    replace(note, inode=(b / "run").stat().st_ino).write(b / "run")
    # it keeps the checkpoint of step 20 as well
    assert not go_on(wide, a, 25, resume=True) and blocks_of(a) == before
    assert len(go_on(wide, b, 30, resume=True)) == 1 and not blocks_of(b) & before
    for steps in (40, 50):
        assert not go_on(wide, a, steps, resume=True) and not go_on(wide, b, steps, resume=True)
        check(a, in_memory)
        check(b, in_memory)
    assert blocks_of(a) == before


def test_a_run_that_is_given_up_keeps_its_hands_off_files_of_others(
    wide: Path, tmp_path: Path, in_memory: dict[int, dict[str, str]]
) -> None:
    """Of a copy that is overwritten, forgotten, or was hidden and is cleaned away, the first keeps
    its files.
    """
    a, b = tmp_path / "a", tmp_path / "b"
    go_on(wide, a, 20)
    shutil.copytree(a, b)
    of_run.forget(b / "run")
    check(a, in_memory)
    go_on(wide, b, 25, overwrite=True, seed=3)
    shutil.copytree(a, b / ".run.killed12")
    (b / ".run.killed12" / "sparrow-prepare.lock").touch()
    go_on(wide, b, 30, resume=True, seed=3)
    assert not (b / ".run.killed12").exists()
    check(a, in_memory)


def test_one_that_trains_is_read_meanwhile_and_has_one_writer(wide: Path, tmp_path: Path) -> None:
    first = trainer(wide, tmp_path, loop__max_steps=25)
    first.fit()
    second = trainer(wide, tmp_path, resume=True)
    with second.callbacks.open():
        second.checkpointer.load(last(tmp_path))
        assert rows_of(last(tmp_path))
        third = trainer(wide, tmp_path, resume=True)
        told = r"table \w+: .*\.blocks is in use by another process; end it"
        with pytest.raises(UserError, match=told), third.callbacks.open():
            third.checkpointer.load(last(tmp_path))


def test_in_the_background(
    wide: Path,
    tmp_path: Path,
    in_memory: dict[int, dict[str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Training changes frames and blocks while a checkpoint is written."""
    write, finish, at, waits = of_saved.write_rows, Saver.finish, list[int](), threading.Event()

    def slow(*arguments: Any) -> Any:
        """Write once training has gone on, unless it waits for this checkpoint."""
        begun = run.progress.step
        while run.progress.step == begun and not waits.wait(0.001):
            pass
        at.append(run.progress.step - begun)
        return write(*arguments)

    def finished(self: Saver) -> None:
        waits.set()
        finish(self)
        waits.clear()

    monkeypatch.setattr(of_saved, "write_rows", slow)
    monkeypatch.setattr(Saver, "finish", finished)
    run = trainer(
        wide, tmp_path, checkpoint__background=True, loop__max_steps=35, tiers__prefetch=2
    )
    run.fit()
    assert sum(steps > 0 for steps in at) >= 10
    check(tmp_path, in_memory)
    monkeypatch.undo()
    trainer(wide, tmp_path, resume=True, checkpoint__background=True).fit()
    check(tmp_path, in_memory)
    assert len(files(tmp_path)) == 5 and files(tmp_path) == needed(tmp_path)
    check_sizes(tmp_path)


def test_with_all_rows(wide: Path, tmp_path: Path, in_memory: dict[int, dict[str, str]]) -> None:
    """Such checkpoints need no folder beside the run's. A run changes between the two kinds."""
    trainer(wide, tmp_path, tiers__full_checkpoints=True, loop__max_steps=25).fit()
    assert not files(tmp_path) and not last(tmp_path).block_files
    shutil.rmtree(tmp_path / "disk")
    check(tmp_path, in_memory)
    trainer(wide, tmp_path, resume=True, loop__max_steps=35).fit()
    check(tmp_path, in_memory)
    assert files(tmp_path) == needed(tmp_path) and len(files(tmp_path)) == 5
    trainer(wide, tmp_path, resume=True, tiers__full_checkpoints=True).fit()
    check(tmp_path, in_memory)
    assert (
        last(tmp_path).step == 60
        and not last(tmp_path).block_files
        and files(tmp_path) == needed(tmp_path)
    )


def test_a_run_that_is_refused_leaves_nothing(
    wide: Path, tmp_path: Path, in_memory: dict[int, dict[str, str]]
) -> None:
    """Nor a folder, before its first checkpoint. What checkpoints need stays, and a run goes on
    with it.
    """
    alone = {"checkpoint__every": 1000, "loop__evaluate_every": 1000}

    def fails(event: str, values: dict[str, Any]) -> None:
        if event == "progress" and values["step"] >= 20:
            assert files(tmp_path)
            raise UserError("enough")

    with pytest.raises(UserError, match="find no frame"):
        few: dict[str, Any] = {"tables__tier__fraction": 0.0, "tables__tier__bytes": 1}
        trainer(wide, tmp_path, data__batch_size=1000, **few).fit()
    assert list((tmp_path / "disk").iterdir()) == []
    with pytest.raises(UserError, match="enough"):
        trainer(wide, tmp_path, listener=fails, **alone).fit()
    assert list((tmp_path / "disk").iterdir()) == []
    trainer(wide, tmp_path, loop__max_steps=25).fit()
    before = files(tmp_path)
    with pytest.raises(UserError, match="enough"):
        trainer(wide, tmp_path, listener=fails, resume=True, **alone).fit()
    with pytest.raises(UserError, match="enough"):  # with files of its own, which go
        trainer(wide, tmp_path, listener=fails, resume=True, tables__seed=7, **alone).fit()
    assert files(tmp_path) == before == needed(tmp_path)
    trainer(wide, tmp_path, resume=True).fit()
    check(tmp_path, in_memory)


def test_deltas_are_those_of_memory(wide: Path, tmp_path: Path) -> None:
    """Model folders of both, of all rows and of those that changed, are the same to the byte."""
    found = []
    for tier in ("ssd", "memory"):
        place, log = tmp_path / tier, [wide.parent / "log.parquet"]
        trainer(wide, place, tables__tier__name=tier, loop__max_steps=25).fit()
        export(place / "run", place / "base", log, which="last")
        trainer(wide, place, tables__tier__name=tier, resume=True).fit()
        export(place / "run", place / "delta", log, which="last", base=[place / "base"])
        found.append([contents(place / name) for name in ("base", "delta")])
    for mine, memory in zip(*found, strict=True):
        assert [
            name for name in memory if mine[name] != memory[name]
        ] == [] and mine.keys() == memory.keys()


def test_pruned_is_as_from_memory_and_leaves_the_checkpoint_whole(
    wide: Path, tmp_path: Path
) -> None:
    """Pruning writes rows, so it has them in a file of its own."""
    found = []
    for tier in ("ssd", "memory"):
        place = tmp_path / tier
        trainer(wide, place, tables__tier__name=tier, loop__max_steps=5).fit()
        before = {path: path.read_bytes() for path in files(place)}
        log = [wide.parent / "log.parquet"]
        pruned = export(place / "run", place / "out", log, which="last", prune=True)
        # rows that never learnt
        back = export(place / "run", place / "back", log, which="last", base=[pruned.path])
        assert {path: path.read_bytes() for path in files(place)} == before
        whole = export(place / "run", place / "whole", log, which="last")
        assert compact(pruned.path, [back.path], place / "again").digest == whole.digest
        found.append([contents(of.path) for of in (pruned, back, whole)])
    assert found[0] == found[1]


# -- the rows that are newer -----------------------------------------------------------------------


def stores_of(of: Trainer) -> list[SsdStore]:
    return [
        store
        for tables in of.job.tables
        for record in tables.all_records()
        if (store := ssd_of(record.store))
    ]


def told(of: Trainer) -> dict[str, tuple[int, int, int]]:
    """Of each table: different rows of batches that were in frames, those that were not, and rows
    that left.
    """
    return {s.component.name: (s.hits, s.used - s.hits, s.left) for s in stores_of(of)}


@pytest.mark.parametrize(
    ("policy", "ahead"),
    [
        ("lru", 2),
        ("lfu", 0),
        *(pytest.param(*of, marks=pytest.mark.slow) for of in (("lru", 0), ("lfu", 2))),
    ],
)
def test_after_a_resume_the_same_rows_leave(
    wide: Path, tmp_path: Path, policy: str, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the run had not been stopped; but rows that were looked at ahead are in frames
    already.
    """
    # counts are halved on both sides of the stop, and not just there
    monkeypatch.setattr(lfu.Config, "halved", 7)
    options = {"tables__tier__policy": policy, "tiers__prefetch": ahead}
    at: dict[int, dict[str, tuple[int, int, int]]] = {}
    with monkeypatch.context() as patched:
        whole = trainer(wide, tmp_path / "whole", **options)
        patched.setattr(
            whole.checkpointer,
            "save",
            lambda progress: at.setdefault(progress.step, told(whole)) and None,
        )
        whole.fit()
    trainer(wide, tmp_path / "cut", loop__max_steps=23, **options).fit()
    shutil.rmtree(last(tmp_path / "cut").path)  # as after a kill
    again = trainer(wide, tmp_path / "cut", resume=True, **options)
    again.fit()
    assert at[60] == told(whole) and last(tmp_path / "cut").step == 60
    for name, (hits, misses, left) in told(again).items():
        began = at[20][name]
        assert (began[1] + misses, began[2] + left) == told(whole)[name][1:]
        assert ahead or began[0] + hits == told(whole)[name][0]
    for mine, of in zip(stores_of(again), stores_of(whole), strict=True):
        assert torch.equal(mine.get_buffer("counts"), of.get_buffer("counts"))
    assert sum(left for _, _, left in told(again).values()) > 50


def test_beneath_exact_rows_each_use_is_counted_once(
    wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the run before the resume has looked at batches ahead, and exact rows have left
    since.
    """
    monkeypatch.setattr(lfu.Config, "halved", 7)
    brought = counted(monkeypatch)
    options = {"tables__tier__policy": "lfu", "tiers__prefetch": 3, "tables__format__name": "int8"}
    options |= {"tables__cache__fraction": 0.03, "tables__tier__fraction": 0.4}
    options |= {"loop__max_steps": 30, "loop__evaluate_every": 99, "checkpoint__every": 10}
    whole = trainer(wide, tmp_path / "whole", **options)
    whole.fit()
    trainer(wide, tmp_path / "cut", **options | {"loop__max_steps": 15}).fit()
    shutil.rmtree(last(tmp_path / "cut").path)  # as after a kill
    again = trainer(wide, tmp_path / "cut", resume=True, **options)
    again.fit()
    for mine, of in zip(stores_of(again), stores_of(whole), strict=True):
        assert torch.equal(mine.get_buffer("counts"), of.get_buffer("counts"))
    assert brought and sum(int(store.get_buffer("counts").sum()) for store in stores_of(whole)) > 60


def as_before(saved: checkpoint.Checkpoint, format: int) -> None:
    """Write it as it was before: without counts of rows.

    As format 4 without ages too, with newer rows ascending, and with SHA-256.
    """
    manifest = json.loads((saved.path / "manifest.json").read_text())
    for entry in manifest["files"].values():
        if "newer" in entry:
            path = saved.path / entry["newer"]
            found = safetensors.torch.load_file(path)
            del found["counts"], entry["blocks"]["batches"]
            is_row, cached = found["row"] >= 0, entry["blocks"]["cached"]
            entry["blocks"]["cached"] = int(is_row[:cached].sum())
            found = {name: of[is_row[: len(of)]] for name, of in found.items()}
            if format == 4:
                order = found["row"].argsort()
                found = {
                    n: t[order].long() if n == "row" else t[order]
                    for n, t in found.items()
                    if n != "age"
                }
                del entry["blocks"]["cached"]
            safetensors.torch.save_file(found, path)
            with open(path, "rb") as file:
                digest = sha256(path.read_bytes()).hexdigest()
                sum = {"sha256": digest} if format == 4 else {"mixed_sum": pieces.sum_of(file)}
            manifest["files"][entry["newer"]] = {"bytes": path.stat().st_size, **sum}
    manifest["format"] = format
    del manifest["sha256"]
    (saved.path / "manifest.json").write_text(
        json.dumps({**manifest, "sha256": store._seal(manifest)})
    )


@pytest.mark.parametrize(("format", "policy"), [(4, "lru"), (5, "lfu")])
def test_earlier_checkpoints_are_read(
    wide: Path,
    tmp_path: Path,
    in_memory: dict[int, dict[str, str]],
    format: int,
    policy: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = {"tables__tier__policy": policy}
    trainer(wide, tmp_path, loop__max_steps=25, **options).fit()
    # the newer rows take more than one, and more than one piece
    monkeypatch.setattr(of_saved, "WINDOW", 1 << 10)
    monkeypatch.setattr(of_saved, "PIECE", 1 << 12)
    assert rows_of(last(tmp_path)) == in_memory[25]
    as_before(last(tmp_path), format)
    check(tmp_path, in_memory)
    trainer(wide, tmp_path, resume=True, **options).fit()
    check(tmp_path, in_memory)
    assert json.loads((last(tmp_path).path / "manifest.json").read_text())["format"] == 6


# -- kills -----------------------------------------------------------------------------------------

# frames, so that rows leave and blocks are written between checkpoints
FEW = {"tables__tier__fraction": 0.05}
CALLS: dict[str, list[tuple[Any, str]]] = {
    "eviction": [(Blocks, "put")],
    "prefetch": [(Blocks, "fetch"), (Blocks, "wait")],
    "sync": [
        (os, "fsync"),
        (SsdStore, "save"),
        (store, "_write"),
        (of_saved, "write_rows"),
        (pieces, "_write_piece"),
    ],
    "rename": [(os, "rename"), (os, "replace"), (SsdStore, "go_on")],
    "prune": [
        (os, "unlink"),
        (shutil, "rmtree"),
        (store, "_prune"),
        (of_run, "remove"),
        (SsdStore, "keep_only"),
    ],
}


def count(kind: str, at: int = -1) -> list[int]:
    """Count calls of a kind, two for each, and kill this process before or after one. Returns the
    counter.
    """
    counter = [0]

    def counted(call: Any) -> Any:
        def counts(*arguments: Any, **named: Any) -> Any:
            now, counter[0] = counter[0], counter[0] + 2
            if now == at:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                return call(*arguments, **named)
            finally:  # some fail, such as one that removes what may not be there
                if now + 1 == at:
                    os.kill(os.getpid(), signal.SIGKILL)

        return counts

    for owner, name in CALLS[kind]:
        setattr(owner, name, counted(getattr(owner, name)))
    return counter


def killed(prepared: str, place: str, kind: str, at: int) -> None:
    """The process of `kill`: trains, from the last checkpoint if there is one, until it is killed.

    kind: of calls, or "moment", which comes after so many milliseconds, whatever the threads of the
    disk are at.
    """
    is_begun = checkpoint.latest(Path(place) / "run" / "checkpoints") is not None
    background = at % 3 == 0
    made = trainer(
        Path(prepared), Path(place), resume=is_begun, checkpoint__background=background, **FEW
    )
    if kind == "moment":
        timer = threading.Timer(at / 1e3, os.kill, (os.getpid(), signal.SIGKILL))
        timer.daemon = True
        timer.start()
    elif kind:
        count(kind, at)
    made.fit()


def kill(
    prepared: Path, place: Path, want: dict[int, dict[str, str]], points: list[tuple[str, int]]
) -> None:
    """Train with a kill at each of some points. After each, all checkpoints that there are must be
    whole.

    Where a run ends before its point comes, its end must be that of a run that was never killed.
    Another begins then.
    """

    def train(kind: str, at: int) -> bool:
        code = "import sys; from tests.extensions.tiers.test_block_files import killed as do; "
        code += "do(*sys.argv[1:4], int(sys.argv[4]))"
        command = [sys.executable, "-c", code, str(prepared), str(place), kind, str(at)]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        assert ended.returncode in ((-signal.SIGKILL, 0) if kind else (0,)), ended.stderr
        check(place, want)
        assert needed(place) <= files(place)
        if ended.returncode:
            return True
        assert last(place).step == 60 and rows_of(last(place)) == want[60]
        assert files(place) == needed(place)
        assert json.loads((place / "run" / "results.json").read_text())["step"] == 60
        check_sizes(place)
        return False

    for kind, at in points:
        if not train(kind, at):
            of_run.forget(place / "run")
            shutil.rmtree(place / "run")
            assert train(kind, at), f"a whole run does not come to {kind} {at}"
    train("", 0)


@pytest.mark.multi
def test_kill(wide: Path, tmp_path: Path, in_memory: dict[int, dict[str, str]]) -> None:
    kill(wide, tmp_path, in_memory, [("eviction", 121)])


@pytest.mark.slow
@pytest.mark.multi
def test_kill_at_a_hundred_points(
    wide: Path, tmp_path: Path, in_memory: dict[int, dict[str, str]]
) -> None:
    """Through evictions, reads ahead, syncs, renames and prunes, and at any moment; before and
    after each call.
    """
    random, points = Random(3), []
    for kind in CALLS:
        with pytest.MonkeyPatch.context() as patch:
            for owner, name in CALLS[kind]:
                patch.setattr(owner, name, getattr(owner, name))
            counter = count(kind)
            begun = time.perf_counter()
            trainer(wide, tmp_path / kind, **FEW).fit()
            took_s = time.perf_counter() - begun
        assert counter[0] > 20, kind
        points += [(kind, random.randrange(counter[0] // 3)) for _ in range(16)]
    # a new process takes longer
    points += [("moment", random.randrange(int(800 * took_s))) for _ in range(20)]
    random.shuffle(points)
    kill(wide, tmp_path, in_memory, points)
