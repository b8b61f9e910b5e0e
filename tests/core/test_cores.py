from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparrow.core import groups
from sparrow.core.cores import cores

V1, V2 = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")
SAY = "from sparrow.core.cores import cores; print(cores())"


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A made-up machine of 8 cores; its files are written by the test."""
    monkeypatch.setattr(groups, "OWN", tmp_path / "own")
    monkeypatch.setattr(groups, "ROOT", tmp_path / "root")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    return tmp_path


def group(system: Path, path: str, **files: str) -> None:
    """A control group; "cpu_max" stands for cpu.max."""
    folder = system / "root" / path
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("cpu_", "cpu.", 1)).write_text(text + "\n")


def test_without_groups_it_is_the_affinity(system: Path) -> None:
    assert cores() == 8
    assert [cores(sharers) for sharers in (2, 3, 8, 9)] == [4, 2, 1, 1]


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"a/b/c": "400000 100000"}, 4),
        # the tightest along the path
        ({"a": "200000 100000", "a/b": "max 100000", "a/b/c": "400000 100000"}, 2),
        ({"a/b": "250000 100000"}, 2),  # whole cores
        ({"a/b/c": "30000 100000"}, 1),
        ({"a/b/c": "max 100000"}, 8),
        ({"a/b/c": "9900000 100000"}, 8),
        ({"a/b/c": ""}, 8),
        ({"elsewhere": "100000 100000"}, 8),
        ({"": "300000 100000"}, 3),  # a container's own group is the root of what it sees
    ],
)
def test_version_2(system: Path, limits: dict[str, str], expected: int) -> None:
    (system / "own").write_text("0::/a/b/c\n")
    for path, text in limits.items():
        group(system, path, cpu_max=text)
    assert cores() == expected


@pytest.mark.parametrize("name", ["cpu", "cpu,cpuacct"])
@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"docker/x": ("200000", "100000")}, 2),
        ({"docker": ("50000", "25000"), "docker/x": ("-1", "100000")}, 2),
        ({"": ("300000", "100000")}, 3),
        ({"docker/x": ("-1", "100000")}, 8),
    ],
)
def test_version_1(
    system: Path, name: str, limits: dict[str, tuple[str, str]], expected: int
) -> None:
    (system / "own").write_text(
        f"7:cpuset:/docker\n4:{name}:/docker/x\n1:name=systemd:/docker/x\n0::/\n"
    )
    for path, (quota, period) in limits.items():
        group(system, f"cpu/{path}", cpu_cfs_quota_us=quota, cpu_cfs_period_us=period)
    assert cores() == expected


def test_affinity_of_this_process() -> None:
    one = min(os.sched_getaffinity(0))
    program = f"import os; os.sched_setaffinity(0, [{one}]); {SAY}"
    assert (
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout
        == "1\n"
    )


@pytest.fixture
def limited() -> Iterator[Path]:
    """A real control group with half a core."""
    version = 1 if (V1 / "cpu.cfs_quota_us").exists() else 2
    folder = (V1 if version == 1 else V2) / f"sparrow-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        try:
            if version == 1:
                (folder / "cpu.cfs_quota_us").write_text("50000")
                (folder / "cpu.cfs_period_us").write_text("100000")
            else:
                (folder / "cpu.max").write_text("50000 100000")
        except OSError as error:
            pytest.skip(f"no quota can be set here: {error}")
        yield folder
    finally:
        folder.rmdir()


def test_a_real_quota(limited: Path) -> None:
    if len(os.sched_getaffinity(0)) < 2 or cores() < 2:
        pytest.skip("one core here, a quota changes nothing")
    program = (
        f"import os; open({str(limited / 'cgroup.procs')!r}, 'w').write(str(os.getpid())); {SAY}"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "1\n", done.stderr
