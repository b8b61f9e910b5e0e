"""Runs with tables on an SSD whose disk is full, fails, or is damaged: one line, and they go on
from what is whole.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sparrow import checkpoint
from sparrow.core import UserError
from sparrow.extensions.tiers.stores.ssd import SsdStore
from sparrow.training.loop import Trainer
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
from tests.small_disk import on_small_disk

__all__ = ["in_memory", "wide"]  # fixtures
STEP = 27  # of the fault


def at_step(
    prepared: Path, place: Path, fault: Callable[[Trainer], Any], **options: Any
) -> Trainer:
    """A run to which something happens after a step."""

    def hear(event: str, values: dict[str, Any]) -> None:
        if event == "progress" and values["step"] == STEP:
            fault(made)

    made = trainer(prepared, place, listener=hear, log__every=1, **FEW, **options)
    return made


def refused(made: Trainer, told: str) -> None:
    """That the run ends with one line."""
    with pytest.raises(UserError) as error:
        made.fit()
    assert re.fullmatch(told, str(error.value)), str(error.value)


def goes_on(prepared: Path, place: Path, want: dict[int, dict[str, str]]) -> None:
    """That all checkpoints are whole, and that the end is that of a run to which nothing
    happened.
    """
    assert checkpoint.steps(place / "run" / "checkpoints")
    check(place, want)
    trainer(prepared, place, resume=True, **FEW).fit()
    check(place, want)
    assert rows_of(last(place)) == want[60]
    assert files(place) == needed(place)


# -- a full disk -----------------------------------------------------------------------------------

GOES_ON = "a run goes on from its last checkpoint with --resume"
FULL = (
    r"\S+: [^\n]+ need up to [\d.]+ MB, and [\d.]+ MB are free or have the run; lower"
    r" checkpoint.keep, or name [^\n]+"
)
TOLD = {
    "disk": (
        r"table \w+, rows \d+ to \d+: cannot write \S+\.blocks: No space left on device; make room"
        rf" .*; {GOES_ON}"
    ),
    "run": (
        r"\S+/run/\S+: cannot (write the checkpoint|be written) \(No space left on device\); make"
        r" room [^\n]+"
    ),
}


def fill(place: Path) -> None:
    """Leave no room in the file system of a folder."""
    with open(place / "other", "wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while file.write(b"x" * size):
                    pass
            except OSError:
                continue


def train_on_a_full_disk(prepared: str, place: str, which: str, wanted: str) -> None:
    """The process of the test: the disk is full after a step, and once more when the run is
    resumed.
    """
    root, full = Path(place), Path(place) / which
    want = {int(step): rows for step, rows in json.loads(Path(wanted).read_text()).items()}
    refused(at_step(Path(prepared), root, lambda made: fill(full)), TOLD[which])
    check(root, want)
    with pytest.raises(UserError) as error:
        trainer(Path(prepared), root, resume=True, **FEW).fit()
    assert re.fullmatch(f"{FULL}|{TOLD[which]}", str(error.value)), str(error.value)
    check(root, want)
    (full / "other").unlink()
    goes_on(Path(prepared), root, want)


@pytest.mark.multi
@pytest.mark.parametrize(
    ("which", "kind"),
    [
        ("disk", "tmpfs"),
        pytest.param("disk", "ext4", marks=pytest.mark.slow),
        pytest.param("run", "tmpfs", marks=pytest.mark.slow),
    ],
)
def test_a_full_disk(
    wide: Path, tmp_path: Path, in_memory: dict[int, dict[str, str]], which: str, kind: str
) -> None:
    (tmp_path / "want").write_text(json.dumps(in_memory))
    code = (
        "import sys; from tests.faults.test_disk import train_on_a_full_disk;"
        " train_on_a_full_disk(*sys.argv[1:])"
    )
    run = [
        sys.executable,
        "-W",
        "ignore",
        "-c",
        code,
        str(wide),
        str(tmp_path),
        which,
        str(tmp_path / "want"),
    ]
    done = subprocess.run(
        [*on_small_disk(tmp_path / which, "8M", kind), *run], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


# -- a device that fails ---------------------------------------------------------------------------


def opened(made: Trainer) -> dict[Path, int]:
    """The files of a run, and where they are open."""
    stores = [record.store for tables in made.job.tables for record in tables.all_records()]
    found = [
        store._opened.file for store in stores if isinstance(store, SsdStore) and store._opened
    ]
    return {of.path: of.fd for of in found}


def fails(made: Trainer) -> None:
    """Have all reads and writes of the run's files end with EIO: they are of memory that the
    process does not have.
    """
    for fd in opened(made).values():
        other = os.open("/proc/self/mem", os.O_RDWR)
        os.dup2(other, fd)
        os.close(other)


@pytest.mark.slow
@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="other systems have no /proc/self/mem"
)
def test_a_device_that_fails(
    wide: Path, tmp_path: Path, in_memory: dict[int, dict[str, str]]
) -> None:
    told = (
        r"table \w+, rows \d+ to \d+: cannot (read|write) \S+\.blocks: Input/output error; check"
        r" the device; "
    )
    refused(at_step(wide, tmp_path, fails), told + GOES_ON)
    goes_on(wide, tmp_path, in_memory)


def flip(made: Trainer) -> None:
    """A bit of each block, at another place in each."""
    for path in opened(made):
        content = bytearray(path.read_bytes())
        for place in range(1, len(content) // 4096):
            content[4096 * place + 37 * place % 4096] ^= 1 << place % 8
        path.write_bytes(content)  # in place


def cut(made: Trainer) -> None:
    for path in opened(made):
        os.truncate(path, 4096)


@pytest.mark.parametrize("fault", [flip, pytest.param(cut, marks=pytest.mark.slow)])
def test_damage_while_it_trains(
    wide: Path, tmp_path: Path, fault: Callable[[Trainer], None]
) -> None:
    """No row of a damaged block is ever used, and checkpoints that have none of these blocks are
    whole.
    """
    told = (
        r"table \w+, rows \d+ to \d+: \S+\.blocks is damaged \((the checksum of|it ends within)"
        r" block \d+[^\n]*\); "
        "go back to a checkpoint whose file is whole, or train the table again"
    )
    refused(at_step(wide, tmp_path, fault), told)
