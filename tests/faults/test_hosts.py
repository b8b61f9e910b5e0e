"""What befalls hosts and the links between them: jobs in a cluster in a box."""

from __future__ import annotations

import functools
import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.cluster.box import Box, Outcome, require
from tests.faults.test_faults import NAMED
from tests.faults.training import EVERY, SETTINGS, Training
from tests.pace import Deadline, slowness

pytestmark = pytest.mark.multi
TIMEOUT = 5  # seconds in which ranks are to answer


@pytest.fixture
def box() -> Iterator[Box]:
    """Two hosts of two ranks."""
    try:
        require()
    except SystemExit as reason:
        pytest.skip(str(reason))
    with Box(hosts=2, ranks_per_host=2, mbit=1000) as made:
        yield made


@functools.cache
def pace() -> float:
    """The slowness for which jobs and their limits are set."""
    return slowness()


def start(box: Box, training: Training, *arguments: str) -> None:
    """The training job as every rank."""
    settings = {**SETTINGS, "sharding.timeout_s": round(TIMEOUT * pace())}
    options = [
        text
        for name, value in settings.items()
        for text in (f"--{name}", json.dumps(value).strip('"'))
    ]
    place = ["--run_dir", str(training.dir)]
    box.start(
        [
            sys.executable,
            "-m",
            "sparrow",
            "train",
            str(training.prepared),
            *place,
            *options,
            *arguments,
        ]
    )


def until(happened: Callable[[], bool], limit_s: float = 60) -> None:
    deadline = Deadline(limit_s)
    while not happened():
        assert not deadline.over, f"nothing in {deadline}"
        time.sleep(0.001)


@contextmanager
def ends_within(box: Box, seconds: float) -> Iterator[list[Outcome]]:
    """What happens in it ends the job so soon; gives how the ranks ended."""
    found: list[Outcome] = []
    limit = Deadline(seconds * pace())
    yield found
    found += box.wait(60 * slowness())
    assert not limit.over


def error(ended: Outcome) -> str:
    """A rank's one line."""
    assert ended.code == 2 and "Traceback" not in ended.err, ended
    (line,) = re.findall(r"^sparrow: error: (.*)$", ended.err, re.MULTILINE)
    return str(line)


@pytest.mark.slow  # tests/distributed/test_watch.py names the ranks that are gone
@pytest.mark.parametrize("host", [0, 1])
def test_killed_host_is_named(box: Box, training: Training, host: int) -> None:
    start(box, training)
    until(lambda: training.step >= 2 * EVERY)
    with ends_within(box, NAMED) as ended:
        box.kill_host(host)
    killed, left = (ended[:2], ended[2:]) if host == 0 else (ended[2:], ended[:2])
    assert [one.code for one in killed] == [-9, -9]
    for one in left:
        gone = r"rank 2 \(last at .*\), rank 3 \(last at .*\) are gone or stopped; rank \d was"
        # rank 0's
        lost = (
            rf"rank {one.rank} at step \d+, .*: the job's store is gone, with the host that had it"
        )
        assert re.match(gone if host else lost, error(one)), one


@pytest.mark.slow
def test_lost_link_is_told_and_the_job_goes_on_from_its_checkpoint(
    box: Box, training: Training, tmp_path: Path
) -> None:
    """A link that is away for a moment changes nothing; one that stays away ends the job; later it
    goes on.
    """
    whole = Training(training.prepared, tmp_path / "whole")
    start(box, whole)
    until(lambda: whole.step >= EVERY)
    box.cut(1)
    time.sleep(1)
    box.mend(1)
    assert [one.code for one in box.wait(120 * slowness())] == [0] * 4
    start(box, training)
    until(lambda: training.step >= 2 * EVERY)
    with ends_within(box, TIMEOUT + 2 * NAMED) as ended:
        box.cut(1)
    for one in ended[:2]:
        assert re.match(
            r"rank 2 \(last at .*\), rank 3 \(last at .*\) are gone or stopped; ", error(one)
        ), one
    for one in ended[2:]:
        assert re.match(
            rf"rank {one.rank} at step \d+, .*: the job's store is gone, with the host that",
            error(one),
        )
    box.mend(1)
    start(box, training, "--resume")
    assert [one.code for one in box.wait(120 * slowness())] == [0] * 4
    training.assert_same(whole)
