"""Forks: the child can compute, and removes nothing of its parent's."""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

_SOFT = 1  # omp_pause_soft, OpenMP 5.0, 3.2.44


def survive_forks() -> None:
    """End the idle threads of OpenMP at each fork; the parent and the child start new ones when
    they compute.

    A child inherits the memory of GNU's OpenMP library, which says that threads wait for work, and
    none of these threads. Its first parallel product would wait for them for ever. Other OpenMP
    libraries see to this themselves.
    """
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=_end_idle_threads)


def finalize(owner: object, act: Callable[..., None], *arguments: Any) -> None:
    """Act when `owner` is collected or this process ends, but not when a fork of it ends."""
    process = os.getpid()

    def act_here() -> None:
        if os.getpid() == process:
            act(*arguments)

    weakref.finalize(owner, act_here)


def _end_idle_threads() -> None:
    for path in _gnu_libraries():
        with suppress(OSError, AttributeError):  # one from before OpenMP 5.0
            ctypes.CDLL(path).omp_pause_resource_all(_SOFT)


def _gnu_libraries() -> set[str]:
    """The copies of GNU's OpenMP library in this process: torch brings one, other packages may
    bring theirs.
    """
    try:
        maps = Path("/proc/self/maps").read_text(errors="surrogateescape").splitlines()
    except OSError:  # not Linux
        return set()
    return {line.split(maxsplit=5)[-1] for line in maps if "/libgomp" in line}
