"""A rank of a job with tables on an SSD is killed; torchrun starts all ranks again, and the end has
the same bits.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import threading
from pathlib import Path
from random import Random
from typing import Any

import pytest

from sparrow import checkpoint
from sparrow.core import UserError
from sparrow.extensions.tiers import block_files as of_run
from sparrow.training import train
from tests.extensions.tiers.test_block_files import (
    FEW,
    SETTINGS,
    check,
    check_sizes,
    count,
    files,
    last,
    needed,
    rows_of,
    wide,
)
from tests.faults.job import Job
from tests.runs import run_of

__all__ = ["wide"]  # a fixture
RANKS = 2
Point = tuple[int, str, int]
"""A rank, a kind of calls as `count` takes it, and which of them; or "moment" and after how many
milliseconds.
"""
LIMITS = {"eviction": 60, "prefetch": 150, "sync": 150, "rename": 16, "prune": 40, "moment": 4000}


def trains(prepared: str, run_dir: Path, **changes: Any) -> int:
    """Train as `sparrow train` does. Returns its exit code."""
    changed = {name.replace("__", "."): value for name, value in (FEW | changes).items()}
    try:
        train(run_of(prepared, run_dir, **SETTINGS | {"sharding.plan": "row_wise"} | changed))
    except UserError as error:
        sys.stderr.write(f"sparrow: error: {error}\n")
        return 2
    return 0


def rank(prepared: str, place: Path, points: list[Point], begins: bool, steps: int) -> int:
    """What a rank does: it trains in memory if it `begins`, then on an SSD, where each attempt has
    a point to kill.
    """
    attempt, me = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
    if begins and not attempt:
        assert trains(prepared, place / "memory", checkpoint__keep=100, loop__max_steps=steps) == 0
    if not me:
        check(place, want_of(place))
        assert needed(place) <= files(place)
    who, kind, at = points[attempt] if attempt < len(points) else (-1, "", 0)
    if who == me and kind == "moment":
        timer = threading.Timer(at / 1e3, os.kill, (os.getpid(), signal.SIGKILL))
        timer.daemon = True
        timer.start()
    elif who == me:
        count(kind, at)
    on_ssd = {
        "tables__tier__name": "ssd",
        "tiers__folder": str(place / "disk"),
        "loop__max_steps": steps,
    }
    return trains(prepared, place / "run", checkpoint__background=attempt % 3 == 1, **on_ssd)


def want_of(place: Path) -> dict[int, dict[str, str]]:
    """The rows of each checkpoint of the ranks with all in memory, by step."""
    found = place / "memory" / "checkpoints"
    return {step: rows_of(checkpoint.load(found, step)) for step in checkpoint.steps(found)}


def results(run_dir: Path) -> dict[str, Any]:
    """What a run found, but for where, and what its tables are in."""
    found = json.loads((run_dir / "results.json").read_text())
    return {name: value for name, value in found.items() if name not in ("run_dir", "tables")}


def kill(prepared: Path, place: Path, points: list[Point], begins: bool, steps: int = 60) -> int:
    """Run a job that is killed at each point in turn, until it ends as one that was never killed.
    Returns how often.
    """
    arguments = [str(prepared), str(place), json.dumps(points), str(int(begins)), str(steps)]
    job = Job(
        RANKS,
        ["-m", "tests.faults.test_ranks_on_ssd", *arguments],
        place / "said",
        restarts=len(points),
    )
    try:
        assert job.end(60 + 20 * len(points)) == 0, job.output
    finally:
        job.close()
    ended = re.findall(r"failed \(exitcode: (-?\d+)\)", job.output)
    assert ended == ["-9"] * len(ended), job.output
    for line in job.errors:
        assert re.match(r"rank \d \(last at [^\n]+\) is gone; rank \d was at ", line), line
    want = want_of(place)
    check(place, want)
    assert last(place).step == steps == max(want) and rows_of(last(place)) == want[steps]
    assert results(place / "run") == results(place / "memory")
    best = [checkpoint.latest(place / of / "checkpoints", best=True) for of in ("run", "memory")]
    assert best[0] == best[1] and files(place) == needed(place) and len(files(place)) == 5 * RANKS
    check_sizes(place)
    return len(ended)


@pytest.mark.slow
@pytest.mark.multi
def test_a_killed_rank(wide: Path, tmp_path: Path) -> None:
    """In the middle of the second checkpoint, of which the other has written its half."""
    assert kill(wide, tmp_path, [(1, "sync", 135)], begins=True, steps=20) == 1


@pytest.mark.slow
@pytest.mark.multi
def test_ranks_killed_at_forty_points(wide: Path, tmp_path: Path) -> None:
    """Any rank, in evictions, reads ahead, syncs, renames and prunes, and at any moment; before and
    after each call.
    """
    random, begins = Random(5), True
    kinds = [kind for kind in LIMITS for _ in range(7)]
    points = [(random.randrange(RANKS), kind, random.randrange(LIMITS[kind])) for kind in kinds]
    random.shuffle(points)
    while points:
        kills = kill(wide, tmp_path, points, begins)
        assert kills, f"a whole run does not come to {points[0]}"
        points, begins = points[kills:], False
        of_run.forget(tmp_path / "run")
        shutil.rmtree(tmp_path / "run")


if __name__ == "__main__":
    sys.exit(
        rank(
            sys.argv[1],
            Path(sys.argv[2]),
            json.loads(sys.argv[3]),
            sys.argv[4] == "1",
            int(sys.argv[5]),
        )
    )
