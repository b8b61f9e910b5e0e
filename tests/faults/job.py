"""A training job as users start it, and what can befall its ranks."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from tests.pace import Deadline

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


class Job:
    """`torchrun` with `ranks` processes of one command; what all of them say is in `output`.

    launch: how torchrun is to find others of its kind, alone unless told.
    """

    def __init__(
        self, ranks: int, command: list[str], place: Path, restarts: int = 0,
        launch: Sequence[str] = ("--standalone",), **environment: str,
    ) -> None:  # fmt: skip
        place.mkdir(parents=True, exist_ok=True)
        self.ranks, self._said = ranks, place / f"said-{len(list(place.glob('said-*')))}.txt"
        command = [
            *TORCHRUN,
            *launch,
            f"--nproc-per-node={ranks}",
            f"--max-restarts={restarts}",
            *command,
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", **environment}
        with open(self._said, "w", encoding="utf-8") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=file, env=environment)

    @property
    def output(self) -> str:
        """Everything said so far."""
        return self._said.read_text(encoding="utf-8")

    @property
    def errors(self) -> list[str]:
        """Sparrow's own lines."""
        return re.findall(r"^sparrow: error: (.*)$", self.output, re.MULTILINE)

    def pid(self, rank: int) -> int:
        """The process of a rank, of the last restart."""
        deadline = Deadline(30)
        while not deadline.over:
            for pid in children(self.process.pid):
                if f"RANK={rank}" in environ(pid):
                    return pid
            time.sleep(0.01)
        raise AssertionError(f"no rank {rank}:\n{self.output}")

    def send(self, number: signal.Signals, rank: int) -> None:
        """A signal to one rank, not to torchrun."""
        os.kill(self.pid(rank), number)

    def until(self, happened: Callable[[], bool], limit_s: float = 60) -> None:
        """Wait for something to happen while the job runs."""
        deadline = Deadline(limit_s)
        while not happened():
            assert self.process.poll() is None, f"ended before that:\n{self.output}"
            assert not deadline.over, f"nothing in {deadline}:\n{self.output}"
            time.sleep(0.001)

    def end(self, limit_s: float = 90) -> int:
        """Its exit code."""
        deadline = Deadline(limit_s)
        while True:
            with suppress(subprocess.TimeoutExpired):
                return self.process.wait(1)
            assert not deadline.over, f"still there after {deadline}:\n{self.output}"

    def close(self) -> None:
        """End what is left of it."""
        for pid in children(self.process.pid) if self.process.poll() is None else []:
            os.kill(pid, signal.SIGKILL)  # a stopped one too
        self.process.kill()
        self.process.wait()


def children(of: int) -> list[int]:
    """The processes that a process started."""
    try:
        text = Path(f"/proc/{of}/task/{of}/children").read_text()
    except FileNotFoundError:
        return []
    return [int(pid) for pid in text.split()]


def environ(pid: int) -> list[str]:
    """A process's environment."""
    try:
        return Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return []
