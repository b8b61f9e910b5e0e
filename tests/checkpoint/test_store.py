from __future__ import annotations

import builtins
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sparrow import checkpoint
from sparrow.checkpoint.pieces import removed
from sparrow.core import Chunk, UserError

IDENTITY = {"model": {"name": "dlrm", "dim": 16}}


def chunk(first: int, last: int, value: float) -> Chunk:
    fields = {"weight": torch.full((last - first, 3), value), "touched": torch.ones(last - first, dtype=torch.uint8)}
    return Chunk(table="a/b", rows=(first, last), columns=(0, 3), fields=fields)


def save(directory: Path, step: int, keep: int = 3) -> Path:
    return checkpoint.save(
        directory,
        step,
        identity=IDENTITY,
        state={"epoch": 1, "loss": 0.1 + 0.2, "best": None},
        parts={"dense": {"w": torch.arange(4.0) * step}, "empty": {}},
        chunks=[chunk(0, 2, step), chunk(2, 5, -step)],
        keep=keep,
    )


def test_comes_back_as_it_was(tmp_path: Path) -> None:
    save(tmp_path, 7)
    saved = checkpoint.load(tmp_path)
    assert (saved.step, saved.state) == (7, {"epoch": 1, "loss": 0.1 + 0.2, "best": None})
    assert torch.equal(saved.part("dense")["w"], torch.arange(4.0) * 7)
    assert saved.part("empty") == {}
    one, two = saved.chunks()
    assert (one.table, one.rows, two.rows) == ("a/b", (0, 2), (2, 5))
    assert torch.equal(two.fields["weight"], torch.full((3, 3), -7.0))
    saved.check(IDENTITY)


def test_keeps_the_last_and_the_best(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step, keep=2)
        if step == 1:
            checkpoint.mark_best(tmp_path, 1)
    save(tmp_path, 4, keep=2)
    assert checkpoint.steps(tmp_path) == [1, 3, 4]
    assert (checkpoint.latest(tmp_path), checkpoint.latest(tmp_path, best=True)) == (4, 1)
    checkpoint.mark_best(tmp_path, 4)
    save(tmp_path, 5, keep=1)
    assert checkpoint.steps(tmp_path) == [4, 5]


def test_another_model(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with pytest.raises(UserError, match=r"checkpoint of another model: model.dim is 16 there and 32 here"):
        checkpoint.load(tmp_path).check({"model": {"name": "dlrm", "dim": 32}})
    with pytest.raises(UserError, match=r"16 there and 32 here; restore the setting or grow$"):
        checkpoint.load(tmp_path).check({"model": {"name": "dlrm", "dim": 32}}, {"dim": "grow"})


@pytest.mark.parametrize("harm", ["flip", "cut", "lose"])
@pytest.mark.parametrize("pattern", ["dense.safetensors", "table-*-000000000002-*"])
def test_damage_is_found_and_named(tmp_path: Path, harm: str, pattern: str) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    (file,) = (tmp_path / "step-000000002").glob(pattern)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    if harm == "lose":
        file.unlink()
    else:
        file.write_bytes(data if harm == "flip" else data[:-1])
    saved = checkpoint.load(tmp_path)
    with pytest.raises(UserError, match=rf"step-000000002.*{file.name}: damaged checkpoint .* delete the folder"):
        saved.part("dense")
        list(saved.chunks())
    checkpoint.remove(tmp_path, 2)
    assert checkpoint.load(tmp_path).part("dense")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 1}'])
def test_a_damaged_manifest(tmp_path: Path, text: str) -> None:
    (save(tmp_path, 1) / "manifest.json").write_text(text)
    with pytest.raises(UserError, match="manifest.json: damaged checkpoint"):
        checkpoint.load(tmp_path)


def test_a_newer_format(tmp_path: Path) -> None:
    path = save(tmp_path, 1) / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 9}))
    with pytest.raises(UserError, match="checkpoint format 9, this Sparrow reads 3 to 6"):
        checkpoint.load(tmp_path)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no checkpoint here"):
        checkpoint.load(tmp_path / "none")
    save(tmp_path, 1)
    with pytest.raises(UserError, match=r"no such checkpoint; there are \[1\]"):
        checkpoint.load(tmp_path, 5)


def test_full_disk_loses_nothing(tmp_path: Path) -> None:
    """A limit on the size of files makes write() fail as a full disk does, with another number."""
    save(tmp_path, 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, before[1]))
    try:
        with pytest.raises(UserError, match=r"step-000000002: cannot write the checkpoint .* resume from step 1"):
            save(tmp_path, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, old)
    assert [p.name for p in tmp_path.iterdir()] == ["step-000000001"]
    assert checkpoint.load(tmp_path).part("dense")


@pytest.mark.skipif(os.geteuid() != 0 or sys.platform != "linux", reason="needs root on Linux to mount a small disk")
def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32k", "none", str(disk)], capture_output=True).returncode:
        pytest.skip("may not mount here")
    try:
        save(disk, 1)
        with pytest.raises(UserError, match=r"No space left on device.*resume from step 1"):
            for step in range(2, 100):
                save(disk, step, keep=100)
        for step in checkpoint.steps(disk):
            assert torch.equal(checkpoint.load(disk, step).part("dense")["w"], torch.arange(4.0) * step)
        assert checkpoint.load(disk, 1).part("dense")
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def die_at(point: int) -> None:
    """SIGKILL this process just before or after its `point`-th call that changes the file system, counted by halves."""
    count = 0

    def dying(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal count
            for now in ("before", "after"):
                count += 1
                if count == point:
                    os.kill(os.getpid(), signal.SIGKILL)
                if now == "before":
                    out = function(*arguments, **options)
            return out

        return call

    for name in ("fsync", "rename", "replace", "open", "mkdir", "rmdir", "unlink"):
        setattr(os, name, dying(getattr(os, name)))
    builtins.open = dying(builtins.open)


@pytest.mark.multi
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_killed_anywhere_a_whole_checkpoint_remains(tmp_path: Path) -> None:
    """Around every call that changes the directory, the renames and the best's mark included."""
    points = 0
    while True:
        points += 1
        directory = tmp_path / str(points)
        save(directory, 1, keep=1)
        checkpoint.mark_best(directory, 1)
        pid = os.fork()  # not spawned: importing torch for every point would take minutes
        if pid == 0:
            die_at(points)
            save(directory, 2, keep=1)
            checkpoint.mark_best(directory, 2)
            save(directory, 3, keep=1)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        for step in (checkpoint.latest(directory), checkpoint.latest(directory, best=True)):
            assert step in (1, 2, 3), points
            saved = checkpoint.load(directory, step)
            assert torch.equal(saved.part("dense")["w"], torch.arange(4.0) * step)
            assert len(list(saved.chunks())) == 2
        save(directory, 4, keep=1)  # and work goes on, without the leftovers
        removed()
        assert {p.name for p in directory.iterdir()} <= {"step-000000004", "best.json", *kept_best(directory)}
        if not os.WIFSIGNALED(status):
            break
    assert points > 40


def kept_best(directory: Path) -> set[str]:
    return {f"step-{checkpoint.latest(directory, best=True):09d}"}
