"""An open-loop load generator for HTTP: a request is sent when it is due, whether or not others
have been answered.

    python benchmarks/open_loop.py    # what rate it reaches against a server that does nothing

`drive` runs it as a process of its own, which imports numpy and nothing else. Latency counts from
when a request was due, so a server that stalls is seen by all requests that came due meanwhile
(Tene, "How NOT to measure latency"). The requests are bytes that were made before. Connections are
kept alive, and more are opened when none is free. A request that finds none free, because
`connections` of them wait for answers, is sent later and counts from when it was due.

Of an answer, status and length are read while the load runs. Different bodies are kept once for
each request, so that all of them can be checked afterwards. How late the generator itself was, and
its share of a core, are in the outcome.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import pickle
import re
import select
import socket
import subprocess
import sys
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

_LENGTH = re.compile(rb"(?i)\r\ncontent-length: *(\d+)")
_READ, _WRITE = select.EPOLLIN, select.EPOLLOUT
_AHEAD_S = 0.2  # between the start of the generator's clock and the first request


@dataclass(kw_only=True)
class Load:
    """What is to be sent.

    Args:
        port: of the server, on this machine.
        requests: whole requests of HTTP.
        due_s: when each is to be sent, float64 [N], rising, counted from the start.
        which: which of `requests` it is, int [N].
        connections: the most that are open.
        opened: how many of them are from the start.
        patience_s: how long after it was due a client waits for an answer. Then it closes the
            connection.
    """

    port: int
    requests: list[bytes]
    due_s: Any
    which: Any
    connections: int = 512
    opened: int = 32
    patience_s: float = 30.0


@dataclass(kw_only=True)
class Outcome:
    """What became of N requests. Times are those of `time.perf_counter`, in seconds; NaN where
    there is none.

    Args:
        due_s, sent_s, done_s: float64 [N].
        status: of HTTP, int [N]; 0 for no answer.
        answer: index of its body in `answers`, int [N]; -1 for none.
        answers: which request, and a body that came for it.
        late_s: how late the generator was with those that found a connection free, float64.
        waited: requests that found none free.
        again: requests that were sent once more, because the server had just closed an idle
            connection.
        core: CPU time of the generator over the time of the load.
    """

    due_s: Any
    sent_s: Any
    done_s: Any
    status: Any
    answer: Any
    answers: list[tuple[int, bytes]]
    late_s: Any
    waited: int
    again: int
    core: float

    @property
    def ms(self) -> Any:
        """Milliseconds from due to answered, of those with status 200."""
        return 1e3 * (self.done_s - self.due_s)[self.status == 200]

    @property
    def all_ms(self) -> Any:
        """The same of all requests. Those with another status never end."""
        return np.where(self.status == 200, 1e3 * (self.done_s - self.due_s), np.inf)

    @property
    def late_ms(self) -> float:
        """The 99th percentile of the generator's own lateness."""
        return 1e3 * float(np.percentile(self.late_s, 99)) if len(self.late_s) else float("inf")

    @property
    def seconds(self) -> float:
        """From the first request that was due to the last answer, or the last that was due."""
        last = self.done_s[~np.isnan(self.done_s)]
        return float(max(self.due_s[-1], last.max() if len(last) else 0) - self.due_s[0])

    def good_per_s(self, deadline_ms: float) -> float:
        """Requests a second that were answered with 200 within a deadline."""
        return float((self.ms <= deadline_ms).sum()) / self.seconds

    def counts(self) -> str:
        """Returns how many had each status, in words, when not all had 200."""
        of = Counter(self.status.tolist())
        named = {status: of.pop(status, 0) for status in (200, 429, 503)} | {
            "other": sum(of.values())
        }
        return (
            ""
            if named[200] == len(self.status)
            else ", ".join(f"{n} x {s}" for s, n in named.items() if n)
        )


def poisson(rate: float, count: int, seed: int = 0) -> Any:
    """Returns times of random arrivals, in seconds, float64 [count]. rate: of them in a second."""
    return np.cumsum(np.random.default_rng(seed).exponential(1 / rate, count))


def http(path: str, body: bytes, headers: dict[str, str] | None = None) -> bytes:
    """Returns a POST."""
    told = {
        "Host": "127.0.0.1",
        "Content-Type": "application/json",
        **(headers or {}),
        "Content-Length": len(body),
    }
    return (
        f"POST {path} HTTP/1.1\r\n" + "".join(f"{n}: {v}\r\n" for n, v in told.items()) + "\r\n"
    ).encode() + body


def drive(load: Load) -> Outcome:
    """Send a load, in a process of its own. Returns what became of it."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).resolve()), "--sent"],
        input=pickle.dumps(vars(load)), stdout=subprocess.PIPE, check=True,
    )  # fmt: skip
    return Outcome(**pickle.loads(done.stdout))


# -- the process -----------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class _Connection:
    """index: of the request that it carries, -1 for none. rest: what is still to be sent. got: of
    the answer.
    """

    socket: socket.socket
    index: int = -1
    rest: memoryview = field(default_factory=lambda: memoryview(b""))
    got: bytes = b""
    is_used: bool = False


class _Generator:
    def __init__(self, load: Load) -> None:
        count, self.load = len(load.due_s), load
        self.poll, self.open, self.free = select.epoll(), {}, []
        self.which: list[int] = np.asarray(load.which).tolist()
        self.sent_s, self.done_s, self.status = [np.nan] * count, [np.nan] * count, [0] * count
        self.answer, self.late_s = [-1] * count, [0.0] * 0
        self.answers: list[tuple[int, bytes]] = []
        # of each request: body, index
        self.last: list[tuple[bytes, int]] = [(b"", -1)] * len(load.requests)
        self.seen: list[dict[bytes, int]] = [{} for _ in load.requests]
        self.waiting: deque[int] = deque()
        self.sent: deque[tuple[int, _Connection]] = deque()
        self.ended, self.waited, self.again = 0, 0, 0
        self.buffer = bytearray(1 << 18)
        self.view = memoryview(self.buffer)

    def run(self) -> Outcome:
        """Send all of it, and wait for the answers."""
        for _ in range(min(self.load.opened, self.load.connections)):
            self.free.append(self._connect())
        clock, waiting, count = time.perf_counter, self.waiting, len(self.which)
        begun, cpu = clock() + _AHEAD_S, time.process_time()
        self.due: list[float] = (begun + np.asarray(self.load.due_s)).tolist()
        at, due = 0, self.due
        while self.ended < count:
            self._give_up(clock() - self.load.patience_s)
            while at < count and due[at] <= clock():
                if waiting or not self._is_free():
                    self.waited += 1
                    waiting.append(at)
                else:
                    self.late_s.append(clock() - due[at])
                    self._send(at)
                at += 1
            while waiting and self._is_free():
                self._send(waiting.popleft())
            left = due[at] - clock() if at < count else 0.1
            if left > 0:
                # in microseconds, where epoll's own wait is in milliseconds
                select.select([self.poll], [], [], left)
            for number, event in self.poll.poll(0, 64):
                if number in self.open:
                    self._ready(self.open[number], event)
        core = (time.process_time() - cpu) / (clock() - begun + _AHEAD_S)
        lists = {
            name: np.array(getattr(self, name))
            for name in ("sent_s", "done_s", "status", "answer", "late_s")
        }
        return Outcome(
            due_s=np.array(due),
            answers=self.answers,
            waited=self.waited,
            again=self.again,
            core=core,
            **lists,
        )

    # -- connections -------------------------------------------------------------------------------

    def _connect(self) -> _Connection:
        made = _Connection(socket.socket())
        made.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        made.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        made.socket.setblocking(False)
        # what is sent before it is connected waits
        made.socket.connect_ex(("127.0.0.1", self.load.port))
        self.open[made.socket.fileno()] = made
        self.poll.register(made.socket.fileno(), _READ)
        return made

    def _give_up(self, before: float) -> None:
        """Close connections of requests that were due before a time, and forget those that were not
        sent.
        """
        while self.sent and self.due[self.sent[0][0]] < before:
            index, one = self.sent.popleft()
            if one.index == index:
                one.is_used = False
                self._lost(one)
        while self.waiting and self.due[self.waiting[0]] < before:
            self._ends(self.waiting.popleft(), 0, b"")

    def _is_free(self) -> bool:
        return bool(self.free) or len(self.open) < self.load.connections

    def _send(self, index: int) -> None:
        try:
            one = self.free.pop() if self.free else self._connect()
        except OSError:  # the server takes no connection
            self._ends(index, 0, b"")
            return
        one.index, one.got, one.rest = index, b"", memoryview(self.load.requests[self.which[index]])
        self.sent_s[index] = time.perf_counter()
        self.sent.append((index, one))
        self._go_on(one)

    def _go_on(self, one: _Connection) -> None:
        """Send what the socket takes."""
        try:
            sent = one.socket.send(one.rest)
        except BlockingIOError:
            sent = 0
        except OSError:
            self._lost(one)
            return
        if sent < len(one.rest) or one.socket.fileno() < 0:
            self.poll.modify(one.socket.fileno(), _READ | _WRITE)
        one.rest = one.rest[sent:]

    def _ready(self, one: _Connection, event: int) -> None:
        if event & _WRITE and one.rest:
            self._go_on(one)
            if not one.rest and one.socket.fileno() >= 0:
                self.poll.modify(one.socket.fileno(), _READ)
            if not event & ~_WRITE:
                return
        try:
            size = one.socket.recv_into(self.buffer)
        except BlockingIOError:
            return
        except OSError:
            size = 0
        if not size:
            self._lost(one)
            return
        data = one.got + self.view[:size] if one.got else bytes(self.view[:size])
        head = data.find(b"\r\n\r\n")
        told = _LENGTH.search(data, 0, head + 2) if head > 0 else None
        if told is None and head > 0:
            raise ValueError(f"an answer without Content-Length: {data[:head]!r}")
        if told is None or len(data) < head + 4 + int(told[1]):
            one.got = data
            return
        index, one.index, one.got, one.is_used = one.index, -1, b"", True
        self.free.append(one)
        self._ends(index, int(data[9:12]), data[head + 4 :])

    def _lost(self, one: _Connection) -> None:
        """The server has closed a connection. As clients do, try another when it was an idle one
        and nothing came.
        """
        number = one.socket.fileno()
        if number >= 0:
            self.poll.unregister(number)
            del self.open[number]
            one.socket.close()
        with contextlib.suppress(ValueError):
            self.free.remove(one)
        if one.index >= 0:
            if one.is_used and not one.got:
                self.again += 1
                self.waiting.appendleft(one.index)
            else:
                self._ends(one.index, 0, b"")
        one.index = -1

    def _ends(self, index: int, status: int, body: bytes) -> None:
        if index < 0:
            return
        self.ended += 1
        self.status[index] = status
        self.done_s[index] = time.perf_counter() if status else np.nan
        if status != 200:
            return
        which = self.which[index]
        before, at = self.last[which]
        if body != before:
            at = self.seen[which].get(body, -1)
            if at < 0:
                at = self.seen[which][body] = len(self.answers)
                self.answers.append((which, body))
            self.last[which] = (body, at)
        self.answer[index] = at


def _sent() -> None:
    load = Load(**pickle.load(sys.stdin.buffer))
    with contextlib.suppress(PermissionError):  # its work is short, and must be on time
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    gc.disable()
    outcome = _Generator(load).run()
    sys.stdout.buffer.write(pickle.dumps(vars(outcome)))


# -- what it reaches -------------------------------------------------------------------------------

_NOTHING = """
import asyncio
try:
    import uvloop as loops
except ImportError:
    loops = asyncio
class One(asyncio.Protocol):
    def connection_made(self, transport): self.to, self.got = transport, 0
    def data_received(self, data):
        self.got += len(data)
        if self.got >= SIZE:
            self.got -= SIZE
            self.to.write(b"HTTP/1.1 200 OK\\r\\ncontent-length: 2\\r\\n\\r\\n{}")
async def main():
    server = await asyncio.get_running_loop().create_server(One, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()
loops.run(main())
"""


def main() -> None:
    """Print lateness and CPU at some rates, against a server that reads a request and answers two
    bytes.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--sent", action="store_true", help="send the load that standard input has; for `drive`"
    )
    if parser.parse_args().sent:
        _sent()
        return
    for size, rates in (
        (1_000, (1_000, 4_000, 8_000, 12_000, 16_000)),
        (80_000, (500, 1_000, 2_000, 4_000)),
    ):
        request = http("/", b"x" * size)
        server = subprocess.Popen(
            [sys.executable, "-c", _NOTHING.replace("SIZE", str(len(request)))],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert server.stdout is not None
            port = int(server.stdout.readline())
            for rate in rates:
                due_s = poisson(rate, rate * 2)
                found = drive(
                    Load(
                        port=port, requests=[request], due_s=due_s, which=np.zeros(len(due_s), int)
                    )
                )
                p50, p99 = np.percentile(found.ms, [50, 99])
                done = len(found.ms) / found.seconds
                print(
                    f"{size:6} bytes, {rate:6,} requests/s: {done:8,.0f} answered, p50 {p50:.2f}"
                    f" p99 {p99:.2f} ms; late by {found.late_ms:.2f} ms (p99), {found.core:.2f} of"
                    " a core"
                )
        finally:
            server.terminate()
            server.wait(10)


if __name__ == "__main__":
    main()
