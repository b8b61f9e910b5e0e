"""Connections of HTTP, bounded in number, in time and in the size of headers, which uvicorn leaves
open.
"""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from sparrow.apps.service.limits import GONE, RETRY_S, Limits

# bytes of an answer that may wait before a clock runs: headers and body then leave in one packet
_UNREAD = 4096
_FULL = b'{"error":"connections: as many are open as are allowed; try again later"}'


def protocol_class(limits: Limits) -> type[HttpToolsProtocol]:
    """Returns the class that `uvicorn.Config` takes as `http`.

    It replaces `limit_concurrency`, which names no time to retry.
    """
    return type("Bounded", (_Connection,), {"limits": limits})


class _Connection(HttpToolsProtocol):
    limits: Limits

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(_UNREAD)
        self._clock: asyncio.TimerHandle | None = None
        self._answer_clock: asyncio.TimerHandle | None = None
        # bytes: not of a body; of this body; of all bodies
        self._size = self._body = self._bodies = 0
        self._in_headers = True
        if len(self.connections) > self.limits.connections:
            self.app = _full
        self._start()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        self.resume_writing()
        gone: Any = None if self.cycle is None else self.cycle.scope.get(GONE)
        if gone is not None:
            gone()
        super().connection_lost(exc)

    # -- what arrives ------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._size = 0
        self._body = 0
        self._in_headers = True
        self._start()

    def on_headers_complete(self) -> None:
        self._size = 0
        self._in_headers = False
        self._stop()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._body += len(body)
        self._bodies += len(body)
        super().on_body(body)

    def data_received(self, data: bytes) -> None:
        bodies = self._bodies
        was_in_headers = self._in_headers
        super().data_received(data)
        # else headers ended here, and the application looks at them
        if self._in_headers or not was_in_headers:
            self._size += len(data) - (self._bodies - bodies)
        # headers; or trailers, and what is between chunks
        if self._size > 1e3 * self.limits.header_kb + self._body:
            self._refuse(b"431 Request Header Fields Too Large")
        elif self._is_idle and self.timeout_keep_alive_task is None and self._clock is None:
            self._start()  # these bytes belong to no request, or to one that was refused

    def _unsupported_upgrade_warning(self) -> None:
        """Say nothing: a request to speak WebSocket is answered as HTTP."""

    @property
    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _start(self) -> None:
        self._stop()
        self._clock = self.loop.call_later(self.limits.read_s, self._late)

    def _stop(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None

    def _late(self) -> None:
        if not self._is_idle:  # an earlier request of the same connection is being answered
            self._start()
        elif self._in_headers:
            self._refuse(b"408 Request Timeout")
        else:
            self.transport.close()

    def _refuse(self, status: bytes) -> None:
        """Close the connection, with an answer unless another one is on its way."""
        if self._is_idle and not self.transport.is_closing():
            body = b'{"error":"headers: too many or too slow; send less, and faster"}'
            head = (
                b"HTTP/1.1 %s\r\ncontent-type: application/json\r\nconnection:"
                b" close\r\ncontent-length: %d\r\n\r\n"
            )
            self.transport.write(head % (status, len(body)) + body)
        self.transport.close()

    # -- what leaves -------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        self._answer_clock = self.loop.call_later(self.limits.write_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._answer_clock is not None:
            self._answer_clock.cancel()
            self._answer_clock = None

    def timeout_keep_alive_handler(self) -> None:
        if self.transport.get_write_buffer_size():  # to close would wait for who does not read
            self.transport.abort()
        super().timeout_keep_alive_handler()


async def _full(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer every request of a connection that is one too many."""
    headers: list[Any] = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(_FULL)),
    ]
    headers += [(b"retry-after", b"%d" % RETRY_S), (b"connection", b"close")]
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 503, "headers": headers})
        await send({"type": "http.response.body", "body": _FULL})
