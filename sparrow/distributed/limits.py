"""How many files a rank may have open. Every connection is one."""

from __future__ import annotations

import os
import resource
import sys
from contextlib import suppress

from sparrow.core.errors import UserError


def need(ranks: int) -> int:
    """Returns how many files one process of a job may need to have open at once.

    A rank is connected to every other rank in three groups. The process that holds the job's store is connected to
    every rank twice.
    """
    return 128 + 5 * ranks


def allow(ranks: int) -> None:
    """Raise the limit of open files of this process to what it needs; UserError if the system does not allow it.

    It raises the limit of torchrun too, which may hold the job's store. Else that limit would cut ranks off.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= need(ranks) or soft == resource.RLIM_INFINITY:
        return
    if hard < need(ranks) and hard != resource.RLIM_INFINITY:
        raise UserError(
            f"{ranks} ranks need {need(ranks)} open files in a process, and {hard} are allowed; raise the limit of "
            f"the host before torchrun (ulimit -n {need(ranks)}, or nofile in /etc/security/limits.conf)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (need(ranks), hard))
    holds_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and os.environ.get("GROUP_RANK") == "0"
    if sys.platform == "linux" and holds_store:
        with suppress(OSError):  # the parent is another user's, or is not torchrun: its limit stays
            resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (need(ranks), hard))
