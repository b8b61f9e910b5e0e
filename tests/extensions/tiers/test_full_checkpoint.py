"""Checkpoints of a run with tables on an SSD get all rows afterwards, and have the same rows at
every moment.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from functools import partial, partialmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sparrow import checkpoint, data
from sparrow.checkpoint import store
from sparrow.cli import main
from sparrow.core import UserError
from sparrow.extensions.tiers import full_checkpoint as whole
from sparrow.extensions.tiers.stores.saved import Saved, SavedStore
from sparrow.extensions.tiers.stores.ssd import SsdStore
from sparrow.extensions.warm_start import warm_start as warm
from sparrow.trained import scorer
from sparrow.trained.scorer import restore
from sparrow.training.rundir import RunDir
from tests.extensions.tiers.test_block_files import (
    FEW,
    check,
    files,
    in_memory,
    last,
    needed,
    rows_of,
    trainer,
    wide,
)

__all__ = ["in_memory", "wide"]  # fixtures


def make_whole(place: Path, which: str) -> int:
    return main(["tables", str(place / "run"), "--whole", which])


def refused(place: Path, which: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    """That the command ends with one line."""
    capsys.readouterr()
    assert make_whole(place, which) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line


@pytest.mark.parametrize(
    "cached", [{}, {"tables__format__name": "int8", "tables__cache__fraction": 0.1}]
)
def test_a_run_that_has_ended(
    wide: Path,
    tmp_path: Path,
    cached: dict[str, Any],
    in_memory: dict[int, dict[str, str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In pieces, one checkpoint after the other. Then its folder on the SSD is not needed, and the
    run goes on.
    """
    trainer(wide, tmp_path, loop__max_steps=25, **FEW, **cached).fit()
    steps = checkpoint.steps(tmp_path / "run" / "checkpoints")
    of = {step: checkpoint.load(tmp_path / "run" / "checkpoints", step) for step in steps}
    want, best = {step: rows_of(one) for step, one in of.items()}, restore(tmp_path / "run").step
    batch = next(iter(data.open(wide).loader(64, "valid")))
    scores = restore(tmp_path / "run", which="last").scores(batch)
    monkeypatch.setattr(Saved, "chunks", partialmethod(Saved.chunks, max_bytes=1 << 12))
    for which in ("last", *map(str, steps)):
        assert make_whole(tmp_path, which) == 0
        check(tmp_path, want)
        assert files(tmp_path) == needed(tmp_path)
    said = " ".join(capsys.readouterr().out.split())
    assert "it has all rows now" in said and "it had all rows already" in said
    assert (
        f"without all rows: step {', '.join(map(str, steps[:-1]))}; --whole {steps[-2]} gives"
        in said
    )
    assert not files(tmp_path)
    shutil.rmtree(tmp_path / "disk")
    check(tmp_path, want)
    for step, before in of.items():
        now = checkpoint.load(before.path.parent, step)
        assert now.fingerprint == before.fingerprint and now.identity == before.identity
        assert {path.name for path in now.path.iterdir()} == {*now.files, "manifest.json"}
        assert not now.block_files and sum(name.startswith("table-") for name in now.files) > 10
    assert torch.equal(restore(tmp_path / "run", which="last").scores(batch), scores)
    assert restore(tmp_path / "run").step == best
    trainer(wide, tmp_path, resume=True, loop__max_steps=30, **FEW, **cached).fit()
    assert last(tmp_path).step == 30 and (cached or rows_of(last(tmp_path)) == in_memory[30])


def test_an_end_at_any_moment_leaves_it_whole(
    wide: Path,
    tmp_path: Path,
    in_memory: dict[int, dict[str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of which the next try goes on from there."""
    trainer(wide, tmp_path, loop__max_steps=10, **FEW).fit()
    moments: list[tuple[Any, str]] = [(store, "_write"), (whole.os, "rename")]
    moments += [(whole, "sync"), (whole, "write_text"), (whole.shutil, "rmtree")]

    def interrupts(*arguments: Any, **named: Any) -> None:
        raise KeyboardInterrupt

    for owner, name in moments:
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, interrupts)
            assert make_whole(tmp_path, "last") == 130, name
        check(tmp_path, in_memory)
        assert bool(last(tmp_path).block_files) == (name != "rmtree")
    assert make_whole(tmp_path, "last") == 0
    check(tmp_path, in_memory)
    saved = last(tmp_path)
    assert {path.name for path in saved.path.iterdir()} == {
        *saved.files,
        "manifest.json",
    }, "something is left over"


def test_what_is_refused(
    wide: Path,
    tmp_path: Path,
    in_memory: dict[int, dict[str, str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In one line; what was there stays, and nothing else is left."""
    refused(tmp_path, "last", "run.toml", capsys)
    trainer(wide, tmp_path, loop__max_steps=5, **FEW).fit()
    names = {path.relative_to(tmp_path) for path in tmp_path.rglob("*")}
    refused(
        tmp_path,
        "sometime",
        "checkpoint: 'sometime' is not 'best', 'last' or a step number",
        capsys,
    )
    refused(tmp_path, "7", "no such checkpoint; there are [5]", capsys)
    with RunDir(tmp_path / "run").locked():
        refused(tmp_path, "last", "another training is running here", capsys)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=1000))
        refused(tmp_path, "last", "all rows need 0.", capsys)

    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(store, "_write", full)
        refused(
            tmp_path,
            "last",
            "step-000000005: cannot be written (No space left on device); make room",
            capsys,
        )
    assert names == {path.relative_to(tmp_path) for path in tmp_path.rglob("*")}
    check(tmp_path, in_memory)
    (tmp_path / "disk").rename(tmp_path / "elsewhere")
    refused(tmp_path, "last", ".blocks is missing; bring it back to there", capsys)


def once(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, do: Callable[[], Any]) -> None:
    """Do something before the first call."""
    real, begun = getattr(owner, name), list[bool]()

    def call(*given: Any, **named: Any) -> Any:
        if not begun:
            begun.append(True)
            do()
        return real(*given, **named)

    monkeypatch.setattr(owner, name, call)


def test_who_reads_meanwhile_has_the_same_scores(
    wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever the files of before go: of the checkpoint, and with the last one those on the
    SSD.
    """
    trainer(
        wide, tmp_path, loop__max_steps=20, loop__evaluate_every=99, checkpoint__keep=4, **FEW
    ).fit()
    batch, read = (
        next(iter(data.open(wide).loader(64, "valid"))),
        partial(restore, tmp_path / "run"),
    )
    want = {step: read(which=str(step)).scores(batch) for step in (5, 10, 15, 20)}
    moments: list[tuple[Any, str]] = [
        (scorer, "load_weights"),
        (SavedStore, "__init__"),
        (SsdStore, "show"),
    ]
    moments.append((SsdStore, "_open"))
    for step, (owner, name) in zip(want, moments, strict=True):
        assert checkpoint.load(tmp_path / "run" / "checkpoints", step).block_files
        with monkeypatch.context() as patched:
            once(patched, owner, name, partial(make_whole, tmp_path, str(step)))
            found = read(which=str(step), own=owner is SavedStore)
        assert torch.equal(found.scores(batch), want[step]), name
        assert not checkpoint.load(tmp_path / "run" / "checkpoints", step).block_files
    assert not files(tmp_path)


def test_who_begins_with_it_meanwhile_is_told(
    wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some rows are those of before, and the checkpoint is not called damaged. Then it can be begun
    with.
    """
    trainer(wide, tmp_path, loop__max_steps=5, **FEW).fit()
    begins = partial(
        trainer, wide, tmp_path / "next", init_from=str(tmp_path / "run"), loop__max_steps=5, **FEW
    )
    with monkeypatch.context() as patched:
        once(patched, warm, "read_optimizer", partial(make_whole, tmp_path, "last"))
        with pytest.raises(
            UserError,
            match="step-000000005: it got all its rows, or was removed, while it was read",
        ):
            begins().fit()
    assert begins().fit()["step"] == 5
