"""How many files a rank may have open: every connection is one."""

from __future__ import annotations

import os
import resource
import sys
from contextlib import suppress

from sparrow.core.errors import UserError


def need(ranks: int) -> int:
    """Files that one process of a job may have open at once.

    A rank is connected to every other in three groups, and whoever holds the job's store to every rank twice.
    """
    return 128 + 5 * ranks


def allow(ranks: int) -> None:
    """Raise the limit of open files of this process to the need; UserError where the system does not let us.

    torchrun's too, where it holds the job's store: it knows nothing of the need, and its limit would cut ranks off.
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
        with suppress(OSError):  # another user's, or not torchrun: then it has what it has
            resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (need(ranks), hard))
