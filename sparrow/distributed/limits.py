"""How many files a rank may have open. Every connection is one."""

from __future__ import annotations

import os
import resource
import sys
from contextlib import suppress

from sparrow.core.errors import UserError


def need(ranks: int, on_gpus: bool = False) -> int:
    """Returns how many files one process of a job may need to have open at once.

    A rank is connected to every other rank in three groups, on GPUs in nine. The process that holds
    the job's store is connected to every rank twice.
    """
    return 128 + (11 if on_gpus else 5) * ranks


def allow(ranks: int, on_gpus: bool = False) -> None:
    """Raise the limit of open files of this process to what it needs; UserError if the system does
    not allow it.

    It raises the limit of torchrun too, which may hold the job's store. Else that limit would cut
    ranks off.
    """
    files = need(ranks, on_gpus)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= files or soft == resource.RLIM_INFINITY:
        return
    if hard < files and hard != resource.RLIM_INFINITY:
        raise UserError(
            f"{ranks} ranks need {files} open files in a process, and {hard} are allowed; raise the"
            f" limit of the host before torchrun (ulimit -n {files}, or nofile in"
            " /etc/security/limits.conf)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    holds_store = (
        os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        and os.environ.get("GROUP_RANK") == "0"
    )
    if sys.platform == "linux" and holds_store:
        with suppress(OSError):  # the parent is another user's, or is not torchrun: its limit stays
            resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (files, hard))
