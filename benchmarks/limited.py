"""Runs a function in a process of its own, with limits of memory and of a device's reads and writes
(cgroup v1).
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path("/sys/fs/cgroup")


@contextmanager
def group(kind: str, **limits: str) -> Iterator[Path]:
    """A control group that goes away at the end. limits: file -> contents, "__" for "."."""
    path = Path(tempfile.mkdtemp(prefix="sparrow-", dir=ROOT / kind))
    try:
        for name, value in limits.items():
            (path / name.replace("__", ".")).write_text(value)
        yield path
    finally:
        path.rmdir()


def device_of(folder: Path) -> str:
    """Returns the number of the device on which a folder lies, as "major:minor"."""
    number = os.stat(folder).st_dev
    return f"{os.major(number)}:{os.minor(number)}"


def _inside(
    groups: list[Path], answer: Any, work: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    for path in groups:
        (path / "cgroup.procs").write_text(str(os.getpid()))
    answer.send(work(*args))


def limited(groups: list[Path], work: Callable[..., Any], *args: Any) -> Any:
    """Returns what work(*args) returns in a new process within some groups.

    Raises:
        RuntimeError: when it ends without an answer, as one does that needs more memory than it may
            have.
    """
    mine, its = multiprocessing.Pipe()
    process = multiprocessing.Process(target=_inside, args=(groups, its, work, args))
    process.start()
    its.close()
    try:
        found = mine.recv()
    except EOFError:
        raise RuntimeError(f"{work.__name__} ended without an answer") from None
    finally:
        process.join()
    return found


def _stands(
    groups: list[Path], asked: Any, made: Callable[..., Callable[..., Any]], args: tuple[Any, ...]
) -> None:
    for path in groups:
        (path / "cgroup.procs").write_text(str(os.getpid()))
    answer = made(*args)
    asked.send(None)
    while (given := asked.recv()) is not None:
        asked.send(answer(*given))


@contextmanager
def standing(
    groups: list[Path], made: Callable[..., Callable[..., Any]], *args: Any
) -> Iterator[Callable[..., Any]]:
    """A function that answers in a new process within some groups: what made(*args) returns there.

    Raises:
        RuntimeError: when the process ends without an answer, see `limited`.
    """
    mine, its = multiprocessing.Pipe()
    process = multiprocessing.Process(target=_stands, args=(groups, its, made, args))
    process.start()
    its.close()

    def answered() -> Any:
        try:
            return mine.recv()
        except EOFError:
            raise RuntimeError(f"{made.__name__} ended without an answer") from None

    def ask(*given: Any) -> Any:
        mine.send(given)
        return answered()

    try:
        answered()
        yield ask
        mine.send(None)
    finally:
        mine.close()  # a process that still waits ends then
        process.join()
