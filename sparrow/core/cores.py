"""The cores that this process may use."""

from __future__ import annotations

import os
from collections.abc import Iterator

from sparrow.core.groups import folders, lines


def cores(sharers: int = 1) -> int:
    """Returns how many whole cores this process may use, at least one.

    The affinity and the CPU time of its control groups limit them.

    sharers: how many processes share these cores, this one included, such as the ranks on this
    host.
    """
    try:
        allowed = len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        allowed = os.cpu_count() or 1
    return max(int(min([allowed, *_quotas()])) // sharers, 1)


def share_cores() -> None:
    """Make libraries that are imported from now on start no more threads than there are cores, and
    let these sleep.

    Such libraries know the affinity, but not the quotas. A thread that spins while it waits holds a
    core that the thread it waits for may need. A program does this once, at its start. What the
    user has set stays.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # else the libraries choose; they may leave out hyper-threads
    if cores() < (os.cpu_count() or 1):
        os.environ.setdefault("OMP_NUM_THREADS", str(cores()))  # torch and Arrow read it


def _quotas() -> Iterator[float]:
    """The CPU time in cores of each control group that limits this process, of version 1 or 2."""
    for folder, version in folders("cpu"):
        if version == 2:
            # "max 100000" for no bound
            words = [word for line in lines(folder / "cpu.max") for word in line.split()]
        else:
            # -1 for none
            words = [*lines(folder / "cpu.cfs_quota_us"), *lines(folder / "cpu.cfs_period_us")]
        if len(words) == 2 and words[0].isdigit() and words[1].isdigit():
            yield int(words[0]) / int(words[1])
