from __future__ import annotations

import builtins
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from sparrow import checkpoint
from sparrow.checkpoint.removal import removed
from sparrow.core import Chunk, UserError

IDENTITY = {"model": {"name": "dlrm", "dim": 16}}


def chunk(first: int, last: int, value: float) -> Chunk:
    fields = {
        "weight": torch.full((last - first, 3), value),
        "touched": torch.ones(last - first, dtype=torch.uint8),
    }
    return Chunk(table="a/b", rows=(first, last), columns=(0, 3), fields=fields)


def save(directory: Path, step: int, keep: int = 3, best_step: int | None = None) -> Path:
    best = {} if best_step is None else {"best_step": best_step}
    return checkpoint.save(
        directory,
        step,
        identity=IDENTITY,
        state={"epoch": 1, "loss": 0.1 + 0.2, "best": None, **best},
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


def test_a_file_is_that_of_safetensors(tmp_path: Path) -> None:
    """To the byte, for every kind of tensor, also one whose only element lies in a row of
    others.
    """
    tensors = {
        name: torch.ones(2, 3).to(getattr(torch, name))
        for name in ("float32", "bfloat16", "int64", "uint8")
    }
    tensors |= {
        "none": torch.zeros(0, 3),
        "scalar": torch.tensor(2.0),
        "one": torch.rand(1, 5)[:, 1],
    }
    tensors |= {"part": torch.rand(3, 5)[:, 1:3], 'é"x': torch.rand(2) > 0.5}
    known = {"identity": IDENTITY, "state": {}, "chunks": []}
    folder = checkpoint.save(tmp_path, 1, parts={"dense": tensors}, **known)
    plain = {name: tensor.contiguous() for name, tensor in tensors.items()}
    assert (folder / "dense.safetensors").read_bytes() == safetensors.torch.save(plain)
    for name, tensor in checkpoint.load(tmp_path).part("dense").items():
        assert torch.equal(tensor, tensors[name])


@pytest.mark.skipif(
    not Path("/proc/self/status").exists(),
    reason="only Linux tells the largest memory of a process",
)
def test_rows_are_written_from_where_they_are(tmp_path: Path) -> None:
    """Four tables of 32 MB in memory: a checkpoint takes no copy of one."""
    program = f"""
from pathlib import Path
import torch
from sparrow import checkpoint
from sparrow.core import Chunk


def peak():
    return 1024 * next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))


def save(step, rows):
    fields = [{{"weight": torch.ones(rows, 256)}} for _ in range(4)]
    chunks = [Chunk(table=str(i), rows=(0, rows), columns=(0, 256), fields=of) for i, of in enumerate(fields)]
    before = peak()
    checkpoint.save(Path({str(tmp_path)!r}), step, identity={{}}, state={{}}, parts={{}}, chunks=chunks)
    print(peak() - before)


save(1, 10)
save(2, 1 << 15)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert int(done.stdout.split()[-1]) < 20e6


def test_keeps_the_last_and_the_best(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, step, keep=2, best_step=1)
    assert checkpoint.steps(tmp_path) == [1, 3, 4]
    assert (checkpoint.latest(tmp_path), checkpoint.latest(tmp_path, best=True)) == (4, 1)
    save(tmp_path, 5, keep=1, best_step=4)
    assert checkpoint.steps(tmp_path) == [4, 5]
    assert checkpoint.latest(tmp_path, best=True) == 4


@pytest.mark.parametrize("note", ["[", "{}", '{"step": 3}', None])
def test_no_loose_note_decides_what_is_best(tmp_path: Path, note: str | None) -> None:
    """Earlier Sparrows named the best in a file without a checksum; it may be left, cut or
    changed.
    """
    for step in (1, 2, 3):
        save(tmp_path, step, keep=1, best_step=1)
    if note is not None:
        (tmp_path / "best.json").write_text(note)
    assert checkpoint.latest(tmp_path, best=True) == 1
    save(tmp_path, 4, keep=1, best_step=1)
    assert checkpoint.steps(tmp_path) == [1, 4]


def test_a_damaged_last_manifest_names_no_best(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step, keep=2, best_step=1)
    manifest = tmp_path / "step-000000003" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"best_step": 1', '"best_step": 2'))
    with pytest.raises(
        UserError, match="step-000000003/manifest.json: damaged checkpoint .* delete the folder"
    ):
        checkpoint.latest(tmp_path, best=True)
    shutil.rmtree(manifest.parent)
    assert checkpoint.latest(tmp_path, best=True) == 1


def test_a_step_that_is_evaluated_after_it_was_saved_becomes_the_best(tmp_path: Path) -> None:
    save(tmp_path, 1, best_step=1)
    save(tmp_path, 2, best_step=1)
    before = checkpoint.load(tmp_path)
    checkpoint.update_state(tmp_path, 2, {"best_step": 2})
    after = checkpoint.load(tmp_path)
    assert checkpoint.latest(tmp_path, best=True) == 2
    assert after.fingerprint == before.fingerprint and after.state == {
        **before.state,
        "best_step": 2,
    }
    assert torch.equal(after.part("dense")["w"], torch.arange(4.0) * 2)


def test_another_model(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with pytest.raises(
        UserError, match=r"checkpoint of another model: model.dim is 16 there and 32 here"
    ):
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
    with pytest.raises(
        UserError, match=rf"step-000000002.*{file.name}: damaged checkpoint .* delete the folder"
    ):
        saved.part("dense")
        list(saved.chunks())
    checkpoint.remove(tmp_path, 2)
    assert checkpoint.load(tmp_path).part("dense")


def test_what_a_manifest_names_is_in_the_folder(tmp_path: Path) -> None:
    """Nothing else is opened: who opens a FIFO waits for ever."""
    path = save(tmp_path / "run", 1)
    (path / "dense.safetensors").rename(tmp_path / "outside")
    saved = checkpoint.load(tmp_path / "run")
    os.mkfifo(path / "dense.safetensors")
    with pytest.raises(
        UserError, match=r"dense.safetensors: no regular file; delete the folder step-000000001"
    ):
        saved.part("dense")
    (path / "dense.safetensors").unlink()
    (path / "dense.safetensors").symlink_to(tmp_path / "outside")
    with pytest.raises(
        UserError, match=r"dense.safetensors: leads to .*outside, out of the folder; del"
    ):
        saved.part("dense")
    saved.files["../../outside.safetensors"] = saved.files["dense.safetensors"]
    (tmp_path / "outside").rename(tmp_path / "outside.safetensors")
    with pytest.raises(UserError, match=r"out of the folder; delete the folder"):
        saved.part("../../outside")
    (path / "manifest.json").unlink()
    os.mkfifo(path / "manifest.json")
    with pytest.raises(UserError, match=r"manifest.json: no regular file; delete the folder"):
        checkpoint.load(tmp_path / "run")


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
        with pytest.raises(
            UserError, match=r"step-000000002: cannot write the checkpoint .* resume from step 1"
        ):
            save(tmp_path, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, old)
    assert [p.name for p in tmp_path.iterdir()] == ["step-000000001"]
    assert checkpoint.load(tmp_path).part("dense")


@pytest.mark.skipif(
    os.geteuid() != 0 or sys.platform != "linux", reason="needs root on Linux to mount a small disk"
)
def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=32k", "none", str(disk)], capture_output=True
    ).returncode:
        pytest.skip("may not mount here")
    try:
        save(disk, 1)
        with pytest.raises(UserError, match=r"No space left on device.*resume from step 1"):
            for step in range(2, 100):
                save(disk, step, keep=100)
        for step in checkpoint.steps(disk):
            assert torch.equal(
                checkpoint.load(disk, step).part("dense")["w"], torch.arange(4.0) * step
            )
        assert checkpoint.load(disk, 1).part("dense")
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def die_at(point: int) -> None:
    """SIGKILL this process just before or after its `point`-th call that changes the file system,
    counted by halves.
    """
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
@pytest.mark.parametrize("stride", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_anywhere_a_whole_checkpoint_remains(tmp_path: Path, stride: int) -> None:
    """Around every call that changes the directory, the renames and a manifest that changes
    included. stride: 1, or so many points are passed over.
    """
    points = 1 - stride
    while True:
        points += stride
        directory = tmp_path / str(points)
        save(directory, 1, keep=1, best_step=1)
        pid = os.fork()  # not spawned: importing torch for every point would take minutes
        if pid == 0:
            die_at(points)
            save(directory, 2, keep=1, best_step=1)
            checkpoint.update_state(directory, 2, {"best_step": 2})
            save(directory, 3, keep=1, best_step=2)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        for step in (checkpoint.latest(directory), checkpoint.latest(directory, best=True)):
            assert step in (1, 2, 3), points
            saved = checkpoint.load(directory, step)
            assert torch.equal(saved.part("dense")["w"], torch.arange(4.0) * step)
            assert len(list(saved.chunks())) == 2
        best_step = checkpoint.latest(directory, best=True)
        save(directory, 4, keep=1, best_step=best_step)  # and work goes on, without the leftovers
        removed()
        assert checkpoint.steps(directory) == sorted({best_step, 4})
        assert {p.name for p in directory.iterdir()} == {
            f"step-{step:09d}" for step in (best_step, 4)
        }
        if not os.WIFSIGNALED(status):
            break
    assert points > 40
