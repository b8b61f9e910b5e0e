"""Asks a service in this process, as a server would: the ASGI application without a socket."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import uvicorn

from sparrow.serving.service.app import Service, app
from sparrow.serving.service.connections import bounded

UNIX, TCP = ("/control", None), ("127.0.0.1", 80)


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
    server: tuple[str, int | None] = TCP,
) -> Got:
    """The answer to a POST, or without a body to a GET."""
    data = json.dumps(body).encode() if isinstance(body, dict) else body or b""
    named = {"content-length": len(data), **(headers or {})}
    scope = {
        "type": "http",
        "method": "GET" if body is None else "POST",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "server": server,
        "headers": [(name.lower().encode(), str(value).encode("latin-1")) for name, value in named.items()],
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


def together(service: Service, requests: list[tuple[str, Any]], taken: list[int] | None = None) -> list[Got]:
    """The answers to several requests that arrive at once. With `taken`, when that is filled by the first one."""

    async def all_of_them() -> list[Got]:
        tasks = []
        for path, body in requests:
            tasks.append(asyncio.ensure_future(asked(service, path, body)))
            while taken is not None and not taken:
                await asyncio.sleep(0.002)
        return list(await asyncio.gather(*tasks))

    return asyncio.run(all_of_them())


@contextmanager
def listening(service: Service) -> Iterator[int]:
    """The port of a service that listens on this machine, as `sparrow serve` has it."""
    with socket.create_server(("127.0.0.1", 0), backlog=2048) as opened:
        http = bounded(service.limits)
        server = uvicorn.Server(
            uvicorn.Config(app(service), http=http, access_log=False, log_config=None, timeout_keep_alive=1)
        )
        thread = threading.Thread(target=server.run, kwargs={"sockets": [opened]})
        thread.start()
        while not server.started:
            time.sleep(0.01)
        yield opened.getsockname()[1]
        server.should_exit = True
        thread.join()
