"""A command as a whole: wall time and, when asked for, the peak memory of its process tree."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

PR_SET_CHILD_SUBREAPER = 36


class Outcome(NamedTuple):
    """bytes_peak: the largest sum of proportional set sizes (PSS) that was seen; 0 when memory was
    not watched.
    """

    seconds: float
    bytes_peak: int
    processes: int


def run(command: Sequence[str | Path], *, memory: bool = False) -> Outcome:
    """Run a command to its end; RuntimeError with its last lines when it fails.

    memory: look 20 times a second at every process that descends from the command, also at those
    whose parent has ended (they become this process's children). It takes time from the cores:
    never with runs that are timed.
    """
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    begin = time.perf_counter()
    process = subprocess.Popen(
        [str(c) for c in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    watch = _Watch(process.pid) if memory else None
    assert process.stdout is not None
    text = process.stdout.read() if not memory else watch.read(process)  # type: ignore[union-attr]
    code = process.wait()
    seconds = time.perf_counter() - begin
    _end_what_is_left()
    if code:
        raise RuntimeError(
            f"{' '.join(map(str, command))}: exit {code}\n" + "\n".join(text.splitlines()[-15:])
        )
    return Outcome(seconds, watch.peak if watch else 0, watch.processes if watch else 0)


class _Watch:
    def __init__(self, root: int) -> None:
        self.root, self.peak, self.processes = root, 0, 0

    def read(self, process: subprocess.Popen[str]) -> str:
        """The output; samples until the command ends."""
        done = threading.Event()
        thread = threading.Thread(target=self._sample, args=(done,))
        thread.start()
        assert process.stdout is not None
        text = process.stdout.read()
        done.set()
        thread.join()
        return text

    def _sample(self, done: threading.Event) -> None:
        while not done.wait(0.05):
            tree = descendants(os.getpid())
            size = sum(map(_bytes_pss, tree))
            self.peak, self.processes = max(self.peak, size), max(self.processes, len(tree))


def descendants(root: int) -> list[int]:
    """Processes below `root`, itself not among them."""
    parents: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                stat = Path(f"/proc/{entry}/stat").read_text()
            except OSError:
                continue  # has just ended
            parent = int(stat.rpartition(")")[2].split()[1])
            parents.setdefault(parent, []).append(int(entry))
    found, queue = [], [root]
    while queue:
        children = parents.get(queue.pop(), [])
        found += children
        queue += children
    return found


def _bytes_pss(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) << 10
    except OSError:
        pass  # has just ended
    return 0


def _end_what_is_left() -> None:
    """Daemons that the command left behind (Ray's): asked to end, waited for, then killed."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.perf_counter() + 5
        for pid in descendants(os.getpid()):
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue
        while descendants(os.getpid()) and time.perf_counter() < deadline:
            try:
                os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            time.sleep(0.02)
