"""Answers while no worker can: requests are told so, and do not wait."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Sequence

import msgspec
from starlette.types import Receive, Scope, Send

from sparrow.apps.service.limits import RETRY_S, Limits
from sparrow.apps.service.metrics import Metrics
from sparrow.apps.service.worker import LAST_S, Server

MESSAGE = "no worker can answer, and the service's log says why; ask again later"
_LIVE = ("/health/live", "/v2/health/live")


class StandIn:
    """Takes what comes in at the sockets of the workers.

    Args:
        listening: these sockets.
        limits: of requests.
        metrics: count its answers.
    """

    def __init__(
        self, listening: Sequence[socket.socket], limits: Limits, metrics: Metrics
    ) -> None:
        self._listening = listening
        self._limits = limits
        self._metrics = metrics
        self._server: Server | None = None
        self._serving: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Answer from now on."""
        if self._server is None:
            self._server = Server(self, self._limits, 1)
            own = [listener.dup() for listener in self._listening]
            self._serving = asyncio.create_task(self._server.serve(own))

    async def end(self) -> None:
        """Leave the sockets to the workers. Who has connected before is answered."""
        server = self._server
        self._server = None
        if server is None:
            return
        assert self._serving is not None
        while not (server.started or self._serving.done()):
            await asyncio.sleep(0.01)
        for opened in getattr(server, "servers", ()):
            opened.close()
        await asyncio.sleep(LAST_S)
        server.should_exit = True
        with contextlib.suppress(OSError):
            await self._serving

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request: what is asked for cannot be had."""
        if scope["type"] != "http":
            return
        status, content = (
            (200, {"live": True}) if scope["path"] in _LIVE else (503, {"error": MESSAGE})
        )
        body = msgspec.json.encode(content)
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        headers += [(b"retry-after", b"%d" % RETRY_S)] if status == 503 else []
        headers += [(b"connection", b"close")]  # the next request is for a worker
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})
        self._metrics.requests.labels("no worker", str(status)).inc()
