"""The cores that this process may use."""

from __future__ import annotations

import os
from collections.abc import Iterator

from sparrow.core.groups import folders, lines


def cores(sharers: int = 1) -> int:
    """Whole cores for this process, at least one: of those it may run on, and of its control groups' CPU time.

    sharers: processes that share them, itself included, such as the ranks on this host.
    """
    try:
        allowed = len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        allowed = os.cpu_count() or 1
    return max(int(min([allowed, *_quotas()])) // sharers, 1)


def share_cores() -> None:
    """Let the libraries that this process imports from now on begin no more threads than it has cores, and sleep.

    They know of affinity, not of quotas. A thread that spins while it waits keeps its own side from a core that
    another program shares. A program does this once, at its start; what the user has set stays.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if cores() < (os.cpu_count() or 1):  # else their own choice, which may leave out hyper-threads
        os.environ.setdefault("OMP_NUM_THREADS", str(cores()))  # torch and Arrow read it


def _quotas() -> Iterator[float]:
    """CPU time in cores, for each control group of this process that bounds it, of version 1 or 2."""
    for folder, version in folders("cpu"):
        if version == 2:
            found = [word for line in lines(folder / "cpu.max") for word in line.split()]  # "max 100000" for no bound
        else:
            found = [*lines(folder / "cpu.cfs_quota_us"), *lines(folder / "cpu.cfs_period_us")]  # -1 for none
        if len(found) == 2 and found[0].isdigit() and found[1].isdigit():
            yield int(found[0]) / int(found[1])
