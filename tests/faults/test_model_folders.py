"""What befalls those who write model folders: a kill at any moment, a full disk."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from sparrow import data
from sparrow.apps.bits.quantize import quantize
from sparrow.apps.generate import generate
from sparrow.core import UserError
from sparrow.serving import load
from sparrow.serving.deltas import compact
from sparrow.serving.export import export
from sparrow.serving.folder import Folder
from sparrow.trained.run import Loop
from sparrow.training import train
from tests.runs import small_run
from tests.serving.test_export import contents

WAYS = ("export", "delta", "compact", "quantize")

# Forks for each moment, before any thread runs: an import of torch takes longer than what is
# killed. A moment is a call that Python's audit hooks hear of, an fsync or a write of rows; at the
# one that is asked for the fork kills itself.
SERVER = """
import os, signal, sys
import sparrow.serving.export
from pathlib import Path
from tests.faults.test_model_folders import write

made = list(map(Path, sys.argv[1:]))
HEARD = ("open", "os.rename", "os.mkdir", "os.rmdir", "os.remove", "shutil.rmtree", "shutil.copyfile")

def hooked(last, out):
    seen = 0

    def moment():
        nonlocal seen
        seen += 1
        if seen == last:
            os.kill(os.getpid(), signal.SIGKILL)

    def heard(event, arguments):
        if event in HEARD and any(str(a).startswith(str(out.parent)) for a in arguments):
            moment()

    sys.addaudithook(heard)
    settle = os.fsync
    os.fsync = lambda handle: (moment(), settle(handle))
    rows = sparrow.serving.rows
    rows.write_tensors = counted(rows.write_tensors, moment)
    return lambda: seen

def counted(write_tensors, moment):
    class Told:
        def __init__(self, file):
            self.file = file

        def write(self, data):
            moment()
            self.file.write(data)

    return lambda file, *more: write_tensors(Told(file), *more)

for line in sys.stdin:
    way, last, out = line.split()
    child = os.fork()
    if not child:
        seen = hooked(int(last), Path(out))
        write(way, Path(out), *made)
        print(seen(), flush=True)
        os._exit(0)
    print("ended", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def write(
    way: str, out: Path, log: Path, run: Path, base: Path, delta: Path, prepared: Path
) -> Folder:
    """Make a folder, in one of WAYS."""
    if way == "quantize":
        return quantize(
            base, out, prepared, budget=float("inf"), tables="int8", rows=200
        ).scorer.folder
    if way == "compact":
        return compact(base, [delta], out)
    return export(run, out, [log], base=[base] if way == "delta" else [])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path, Path, Path]:
    """Log, run, base, delta, and the prepared log."""
    place = tmp_path_factory.mktemp("folders")
    log = place / "log.parquet"
    generate(log, rows=1000, users=60, items=40, categorical=3, numeric=3, seed=5)
    prepared = data.prepare([log], place / "prepared").out
    train(small_run(prepared, place / "before", loop=Loop(max_steps=2)))
    train(
        small_run(
            prepared,
            place / "run",
            loop=Loop(max_steps=1),
            batch_size=32,
            init_from=str(place / "before"),
        )
    )
    export(place / "before", place / "base", [log])
    export(place / "run", place / "delta", [log], base=[place / "base"])
    return log, place / "run", place / "base", place / "delta", prepared


@pytest.fixture(scope="module")
def killed(made: tuple[Path, ...]) -> Iterator[Callable[[str, int, Path], tuple[int, int]]]:
    """Gives a function: way, moment, folder -> how many moments there were (0 if it was killed),
    and the exit code.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SERVER, *map(str, made)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as server:
        assert server.stdin is not None and server.stdout is not None

        def run(way: str, last: int, out: Path) -> tuple[int, int]:
            assert server.stdin is not None and server.stdout is not None
            print(way, last, out, file=server.stdin, flush=True)
            first = server.stdout.readline()
            seen = 0 if first.startswith("ended") else int(first)
            return seen, int((first if not seen else server.stdout.readline()).split()[1])

        yield run
        server.stdin.close()


@pytest.mark.parametrize("points", [3, pytest.param(50, marks=pytest.mark.slow)])
@pytest.mark.parametrize("way", WAYS)
def test_killed_at_any_moment_it_is_there_or_not(
    way: str,
    points: int,
    made: tuple[Path, Path, Path, Path, Path],
    killed: Callable[[str, int, Path], tuple[int, int]],
    tmp_path: Path,
) -> None:
    """Whole and as it was to be, or nothing of that name, and then a second try is not in the way
    of what is left.
    """
    place, base = tmp_path / "place", made[2]
    place.mkdir()
    moments, code = killed(way, 0, place / "model")
    assert code == 0 and moments > 40
    expected, without = contents(place / "model"), 0
    for last in np.linspace(1, moments, points).astype(int).tolist():
        shutil.rmtree(place / "model", ignore_errors=True)
        assert killed(way, last, place / "model") == (0, -signal.SIGKILL), last
        if (place / "model").exists():
            assert contents(place / "model") == expected, last
            load(base, [place / "model"]) if way == "delta" else load(place / "model")
            shutil.rmtree(place / "model")
        else:
            without += 1
        for left in place.glob(".model.*"):
            # killed before it had a lock: what is so empty is taken away a minute later
            if not any(left.iterdir()):
                os.utime(left, (0, 0))
        write(way, place / "model", *made)
        assert contents(place / "model") == expected, last
        assert [path.name for path in place.iterdir()] == ["model"], last
    assert 0 < without < points or points < 50


@pytest.mark.skipif(
    os.geteuid() != 0 or sys.platform != "linux", reason="needs root on Linux to mount a small disk"
)
@pytest.mark.parametrize(
    ("way", "kilobytes"),
    [
        pytest.param(way, size, marks=() if (i + j) % 2 == 0 else pytest.mark.slow)
        for i, way in enumerate(WAYS)
        for j, size in enumerate((8, 32, 48, 64))
    ],
)
def test_on_a_full_disk_there_is_nothing(
    way: str, kilobytes: int, made: tuple[Path, Path, Path, Path, Path], tmp_path: Path
) -> None:
    """Wherever it ends: among tables, weights or rows that are kept."""
    disk = tmp_path / "disk"
    disk.mkdir()
    options = f"size={kilobytes}k"
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "none", str(disk)], capture_output=True
    ).returncode:
        pytest.skip("may not mount here")
    try:
        with pytest.raises(
            UserError, match=r"disk/.*cannot be written \(.*No space left.*make room"
        ):
            write(way, disk / "model", *made)
        assert not list(disk.iterdir())
    finally:
        subprocess.run(["umount", str(disk)], check=True)
