"""A service as a process of its own, and loads for it."""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from _peers.process import _bytes_pss, descendants
from _peers.rank_requests import Asked, Protocol, apart
from open_loop import Load, Outcome, drive, poisson

from sparrow.cli.serve import serve

OFFERED = set(inspect.signature(serve).parameters)
"""What `sparrow serve` of this checkout can be told."""
ROOT = Path(inspect.getfile(serve)).parents[2]
START_S = 600.0
LEAST, PATIENCE_S = 10.0, 5.0  # requests a second; how long a client waits


class SkippedError(Exception):
    """A case that cannot be measured, and why."""


@dataclass(kw_only=True)
class Server:
    """A service that answers.

    Args:
        process: its first one.
        port: of requests.
        metrics: address of what Prometheus reads.
        control: its socket.
        files: where what it reads is, if it is a peer.
        seconds: from its start until it was ready.
    """

    process: Any
    port: int
    metrics: str = ""
    control: Path | None = None
    files: Path | None = None
    seconds: float = 0.0

    @property
    def pids(self) -> list[int]:
        """All of its processes."""
        return [self.process.pid, *descendants(self.process.pid)]

    @property
    def bytes_pss(self) -> int:
        """Memory of all of its processes; what they share counts once."""
        return sum(map(_bytes_pss, self.pids))

    @property
    def cpu_s(self) -> float:
        """Seconds of CPU time of all of its processes."""
        total = 0
        for pid in self.pids:
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                total += int(fields[11]) + int(fields[12])
        return total / os.sysconf("SC_CLK_TCK")

    def stages(self) -> dict[str, tuple[float, float]]:
        """Returns stage -> seconds, and of how many requests."""
        text = urllib.request.urlopen(self.metrics, timeout=10).read().decode()
        found: dict[str, dict[str, float]] = {}
        for of, labels, value in re.findall(
            r"^sparrow_stage_seconds_(sum|count){([^}]*)} (\S+)$", text, re.M
        ):
            (stage,) = re.findall(r'stage="(\w+)"', labels)
            found.setdefault(stage, {"sum": 0.0, "count": 0.0})[of] += float(value)
        return {stage: (of["sum"], of["count"]) for stage, of in found.items()}


@contextlib.contextmanager
def sparrow(
    model: Path, log: Path, control: Path | None = None, **options: Any
) -> Iterator[Server]:
    """Serve a model folder.

    Args:
        model: the folder.
        log: a file for what the service says.
        control: path of a socket.
        options: further ones of `sparrow serve`.

    Raises:
        SkippedError: when this checkout does not offer an option.
    """
    if odd := options.keys() - OFFERED:
        raise SkippedError(f"sparrow serve has no --{min(odd).replace('_', '-')} here")
    given = {"port": 0, "deadline_ms": 100, **options} | (
        {"admin_port": 0} if "admin_port" in OFFERED else {}
    )
    command = [sys.executable, "-m", "sparrow", "serve", str(model)]
    for name, value in (given | ({"control": control} if control else {})).items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    begun = time.perf_counter()
    # `-m` looks there first
    start = partial(subprocess.Popen, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    with log.open("w") as out, ended(start(command, stderr=out)) as made:
        line = ""
        while "http://" not in line:
            line = made.stdout.readline()
            if not line:
                raise RuntimeError(f"{' '.join(command)}: {log.read_text()[-1000:]}")
        port = int(re.findall(r"http://[^/]*?:(\d+)", line)[0])
        told = re.findall(r"http://[^/ ]*:\d+/metrics", line)
        metrics = told[0] if told else f"http://127.0.0.1:{port}/metrics"
        wait(f"http://127.0.0.1:{port}/health/ready", made, log)
        seconds = time.perf_counter() - begun
        yield Server(process=made, port=port, metrics=metrics, control=control, seconds=seconds)


@contextlib.contextmanager
def ended(process: Any) -> Iterator[Any]:
    """Ends a process, and what it has started, after use."""
    try:
        yield process
    finally:
        tree = descendants(process.pid)
        process.terminate()
        try:
            process.wait(40)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for pid in tree:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)


def wait(address: str, process: Any, log: Path, seconds: float = START_S) -> None:
    """Wait until an address answers with 200. RuntimeError, with the errors of a log, when the
    process has ended.
    """
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        try:
            if urllib.request.urlopen(address, timeout=5).status == 200:
                return
        except OSError:
            pass
        if process.poll() is not None:
            break
        time.sleep(0.02)
    lines = [
        line
        for line in log.read_text(errors="replace").splitlines()
        if re.search(r"(?i)error|exception", line)
    ]
    raise RuntimeError(f"does not start: {' | '.join(lines[-3:])}")


# -- loads -----------------------------------------------------------------------------------------

Run = Callable[[float, int], Outcome]
"""(requests a second, how many) -> what became of them, once every score has been found right."""


def runner(
    port: int,
    asked: Sequence[Asked],
    protocol: Protocol,
    checked: Callable[[Outcome], None],
    connections: int = 512,
) -> Run:
    """Returns what sends a load of random requests at random times."""
    requests = [protocol.request(number, one) for number, one in enumerate(asked)]
    seeds = iter(range(10**6))

    def run(rate: float, count: int) -> Outcome:
        seed = next(seeds)
        which = np.random.default_rng(seed).integers(0, len(requests), count)
        due_s = poisson(rate, count, seed)
        outcome = drive(
            Load(
                port=port,
                requests=requests,
                due_s=due_s,
                which=which,
                connections=connections,
                patience_s=PATIENCE_S,
            )
        )
        checked(outcome)
        return outcome

    return run


def same(
    port: int, asked: Sequence[Asked], protocol: Protocol, rate: float = 40.0
) -> tuple[float, Outcome]:
    """Send each request once, so slowly that most are scored alone.

    Returns:
        How far scores lie apart at most, and what became of the requests.

    Raises:
        AssertionError: when a request is not answered with 200, five times: a busy machine may
            refuse some.
    """
    requests = [protocol.request(number, one) for number, one in enumerate(asked)]
    due_s, which = np.arange(len(asked)) / rate, np.arange(len(asked))
    for _ in range(5):
        outcome = drive(Load(port=port, requests=requests, due_s=due_s, which=which))
        if not outcome.counts():
            break
    assert not outcome.counts(), f"before the load: {outcome.counts()}"
    return (
        max(apart(asked[number], protocol.told(body)) for number, body in outcome.answers),
        outcome,
    )


def meets(outcome: Outcome, limit_ms: float) -> bool:
    """Whether 99 of 100 requests were answered with 200 within a limit."""
    return bool(np.percentile(outcome.all_ms, 99, method="higher") <= limit_ms)


def fastest(
    run: Run,
    limit_ms: float,
    first: float,
    count: int | Callable[[float], int],
    probe_s: float = 2.0,
    step: float = 2.0,
    light: Outcome | None = None,
) -> tuple[float, Outcome]:
    """Returns the largest rate at which p99 is within a limit, and its outcome; 0 and that of a
    light load for none.

    It is looked for with short loads, upwards or downwards in steps, which are halved then until
    they are below 5 %. Because other programs disturb a short load, one that fails is tried again.
    Then `count` requests are sent at that rate: what is a little too much shows late. While these
    take longer, the rate is lowered by 7 %.

    Args:
        run: sends a load.
        limit_ms: of p99.
        first: the rate to begin with.
        count: requests of the last load; a number takes four times as long as a short load at
            least.
        probe_s: seconds of a short load.
        step: from a rate to the next one, as their ratio.
        light: of a light load, if there was one.
    """
    many = count if callable(count) else lambda rate: max(count, round(rate * 4 * probe_s))

    def short(rate: float) -> bool:
        return any(meets(run(rate, max(50, round(rate * probe_s))), limit_ms) for _ in range(2))

    light = light or run(LEAST, 10)
    if np.median(light.all_ms) > limit_ms:
        return 0.0, run(LEAST, 100)
    rate = max(first, LEAST)
    if short(rate):
        while short(rate * step):
            rate *= step
    else:
        while not short(rate := rate / step):
            if rate < LEAST:
                return 0.0, run(LEAST, 100)
    while step > 1.05:
        step **= 0.5
        if short(rate * step):
            rate *= step
    for _ in range(16):
        outcome = run(rate, many(rate))
        if meets(outcome, limit_ms):
            return rate, outcome
        rate *= 0.93
    return 0.0, run(LEAST, 100)


def point(what: str, size: int, outcome: Outcome) -> str:
    """Returns a line about a load. One at which the generator was late says nothing of the
    service.
    """
    p50, p99, p999 = np.percentile(outcome.ms, [50, 99, 99.9]) if len(outcome.ms) else [np.nan] * 3
    candidates = size * len(outcome.ms) / outcome.seconds
    counts, late = outcome.counts(), outcome.late_ms
    return (
        f"{what}: p50 {p50:.2f} p99 {p99:.2f} p99.9 {p999:.2f} ms, {candidates:,.0f} candidates/s"
        + (f", {counts}" if counts else "")
        + f"; generator late by {late:.2f} ms (p99), {outcome.core:.2f} core"
        + (f", {outcome.waited} found no connection" if outcome.waited else "")
        + (": too late, no figure of the service" if late > p99 / 4 else "")
    )
