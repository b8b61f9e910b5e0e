from __future__ import annotations

import asyncio
import http.client
import json
import socket
from typing import Any

from sparrow.apps.service.limits import Limits
from sparrow.apps.service.metrics import Metrics
from sparrow.apps.service.stand_in import MESSAGE, StandIn


def test_while_no_worker_answers_requests_are_told_so() -> None:
    """At once, each on a connection of its own. Then the socket is for others again."""
    metrics = Metrics()

    def ask(port: int, method: str, path: str, body: bytes | None = None) -> tuple[int, Any, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request(method, path, body)
        answer = connection.getresponse()
        found = answer.status, json.loads(answer.read()), answer.headers
        connection.close()
        return found

    async def steps() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            stand_in, port = StandIn([listener], Limits(), metrics), listener.getsockname()[1]
            await stand_in.end()  # nothing to do
            for _ in range(2):
                stand_in.begin()
                stand_in.begin()
                for method, path in (("POST", "/rank"), ("GET", "/health/ready"), ("GET", "/no")):
                    status, told, headers = await asyncio.to_thread(ask, port, method, path, b"{}")
                    assert (status, told) == (503, {"error": MESSAGE})
                    assert headers["retry-after"] == "1" and headers["connection"] == "close"
                assert (await asyncio.to_thread(ask, port, "GET", "/health/live"))[:2] == (
                    200,
                    {"live": True},
                )
                await stand_in.end()
            listener.setblocking(True)
            waiting = asyncio.create_task(
                asyncio.to_thread(socket.create_connection, ("127.0.0.1", port), 60)
            )
            ours, _ = await asyncio.to_thread(listener.accept)
            ours.close()
            (await waiting).close()

    asyncio.run(steps())
    assert metrics.requests.labels("no worker", "503")._value.get() == 6
