"""Asks a service in this process, as a server would: the ASGI application without a socket."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPConnection, IncompleteRead
from pathlib import Path
from typing import Any, NamedTuple

import uvicorn
from prometheus_client import generate_latest

from sparrow.apps.service import admin
from sparrow.apps.service.admin import Admin
from sparrow.apps.service.app import Service, app
from sparrow.apps.service.connections import protocol_class

TCP = ("127.0.0.1", 80)


def counted(service: Service) -> str:
    """What a service of this process has counted, as Prometheus reads it."""
    service.metrics.flush()
    return generate_latest(service.metrics.registry).decode()


class Got(NamedTuple):
    status: int
    headers: dict[bytes, bytes]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


async def asked(
    service: Service,
    path: str,
    body: bytes | dict[str, Any] | None = None,
    headers: dict[str, Any] | None = None,
    method: str = "",
) -> Got:
    """The answer to a POST, or without a body to a GET, unless a method is given."""
    data = json.dumps(body).encode() if isinstance(body, dict) else body or b""
    named = {"content-length": len(data), **(headers or {})}
    scope = {
        "type": "http",
        "method": method or ("GET" if body is None else "POST"),
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "server": TCP,
        "headers": [
            (name.lower().encode(), str(value).encode("latin-1")) for name, value in named.items()
        ],
    }
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": data, "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    await app(service)(scope, receive, send)
    start, *parts = sent
    return Got(start["status"], dict(start["headers"]), b"".join(part["body"] for part in parts))


def ask(*given: Any, **named: Any) -> Got:
    """`asked`, alone."""
    return asyncio.run(asked(*given, **named))


def with_constants(**values: float) -> str:
    """A program that is `sparrow` with other constants in the process that keeps the workers, so
    that a test need not wait for long. values: by module and name, as child__TICK_S.
    """
    lines = [f"    {name.replace('__', '.', 1)} = {value}" for name, value in values.items()]
    return "\n".join(
        (
            "import sys",
            "from sparrow.apps.service import run",
            "from sparrow.cli import main",
            "keep = run._run",
            "def keep_with_constants(*given):",
            "    from sparrow.apps.service import child, supervisor, watch",
            *lines,
            "    return keep(*given)",
            "if __name__ == '__main__':",
            "    run._run = keep_with_constants",
            "    sys.exit(main())",
        )
    )


class Server:
    """A process of `sparrow serve`, on free ports. under: a command that starts it. program: what
    Python runs.
    """

    def __init__(
        self,
        model: Path,
        *options: str,
        under: Sequence[str] = (),
        program: Sequence[str] = ("-m", "sparrow"),
    ) -> None:
        command = [
            sys.executable,
            *program,
            "serve",
            str(model),
            "--port",
            "0",
            "--admin-port",
            "0",
            *options,
        ]
        with tempfile.TemporaryFile() as file:  # a pipe would be full one day
            self._said = os.dup(file.fileno())
        self.process = subprocess.Popen(
            [*under, *command],
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            start_new_session=True,
        )
        try:
            assert self.process.stdout is not None
            self.told = self.process.stdout.readline()
            self.port, self.admin = map(
                int, re.findall(r"127\.0\.0\.1:(\d+)", self.told)[:2] or (0, 0)
            )
        except BaseException:  # nobody else knows of the process
            self.process.kill()
            self.process.communicate()
            raise

    @property
    def said(self) -> str:
        """What it has said as errors so far."""
        return os.pread(self._said, os.fstat(self._said).st_size, 0).decode()

    def ask(self, path: str, body: dict[str, Any] | None = None, *, admin: bool = False) -> Got:
        """An answer that breaks off, since its worker was killed, is a lost connection."""
        connection = HTTPConnection("127.0.0.1", self.admin if admin else self.port, timeout=60)
        try:
            connection.request("POST" if body else "GET", path, json.dumps(body) if body else None)
            answer = connection.getresponse()
            return Got(
                answer.status,
                {k.lower().encode(): v.encode() for k, v in answer.getheaders()},
                answer.read(),
            )
        except IncompleteRead as error:
            raise ConnectionResetError(str(error)) from error
        finally:
            connection.close()

    def metrics(self) -> str:
        """Of all workers."""
        return self.ask("/metrics", admin=True).body.decode()

    def count(self, name: str) -> float:
        """What its workers, also dead ones, and their supervisor have counted."""
        return sum(
            map(float, re.findall(rf"^{re.escape(name)} (\S+)$", self.metrics(), re.MULTILINE))
        )

    def workers(self) -> list[int]:
        """The numbers of its processes that answer: children of its child that forks."""
        parents = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        return sorted(
            pid for pid, parent in parents.items() if parents.get(parent) == self.process.pid
        )

    def end(self, sent: int = signal.SIGTERM, group: bool = False) -> tuple[int, str]:
        """Its exit code, and what it said as an error."""
        (os.killpg if group else os.kill)(self.process.pid, sent)
        self.process.communicate(timeout=60)
        return self.process.returncode, self.said


def together(
    service: Service, requests: list[tuple[str, Any]], taken: list[int] | None = None
) -> list[Got]:
    """The answers to several requests that arrive at once. With `taken`, when that is filled by the
    first one.
    """

    async def all_of_them() -> list[Got]:
        tasks = []
        for path, body in requests:
            tasks.append(asyncio.ensure_future(asked(service, path, body)))
            while taken is not None and not taken:
                await asyncio.sleep(0.002)
        return list(await asyncio.gather(*tasks))

    return asyncio.run(all_of_them())


@contextmanager
def listening(service: Service | Admin) -> Iterator[int]:
    """The port of a service, or of what operators ask, that listens on this machine, as
    `sparrow serve` has it.
    """
    made = app(service) if isinstance(service, Service) else admin.app(service, Path("absent"))
    with socket.create_server(("127.0.0.1", 0), backlog=2048) as opened:
        http = protocol_class(service.limits)
        server = uvicorn.Server(
            uvicorn.Config(
                made, http=http, ws="none", access_log=False, log_config=None, timeout_keep_alive=1
            )
        )
        thread = threading.Thread(target=server.run, kwargs={"sockets": [opened]})
        thread.start()
        while not server.started:
            time.sleep(0.01)
        try:
            yield opened.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()
