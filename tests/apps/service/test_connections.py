"""Clients that are slow, cut off, too many or do not read, against a socket."""

from __future__ import annotations

import json
import resource
import socket
import time
from collections.abc import Callable
from http.client import HTTPConnection
from typing import Any

import pytest

from sparrow.apps.service.app import Service
from sparrow.apps.service.limits import Limits
from sparrow.serving import Scorer
from tests.apps.service.asking import Got, listening
from tests.apps.service.test_batcher import assert_scored, held, request
from tests.pace import Deadline

HASTY = Limits(deadline_ms=60_000, read_s=0.5, write_s=0.5, header_kb=4, connections=3)


def post(port: int, body: Any) -> Got:
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("POST", "/rank", json.dumps(body))
        answer = connection.getresponse()
        return Got(
            answer.status,
            {k.lower().encode(): v.encode() for k, v in answer.getheaders()},
            answer.read(),
        )
    finally:
        connection.close()


def opened(port: int, sent: bytes = b"", buffer: int = 0) -> socket.socket:
    found = socket.socket()
    if buffer:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    found.settimeout(30)
    found.connect(("127.0.0.1", port))
    found.sendall(sent)
    return found


def rest(one: socket.socket) -> bytes:
    """What comes until the other side ends the connection."""
    found = b""
    try:
        while part := one.recv(65536):
            found += part
    except ConnectionResetError:
        pass
    finally:
        one.close()
    return found


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"", b"408"),
        (b"POST /rank HTTP/1.1\r\nhost: x\r\n", b"408"),
        (b"POST /rank HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{", b"408"),
        (b"POST /rank HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 5000, b"431"),
        (b"POST /rank HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 5000 + b"\r\n\r\n", b"431"),
        (b"POST /rank HTTP/1.1\r\nhost: x\r\ncontent-length: x\r\n\r\n", b"400"),
        (b"\0\xff", b"400"),
        (b"GET /\xff HTTP/1.1\r\nhost: x\r\n\r\n", b"400"),
        # and an end of line, then nothing
        (b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n\r\n", b"200"),
        (b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\nGET /health/live HTTP/1.1\r\n", b"200"),
        (b"POST /rank HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n", b"408"),
        (b"POST /absent HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{", b"404"),
    ],
    ids=lambda value: repr(value[:70]),
)
def test_what_comes_too_slowly_or_is_too_much(
    sent: bytes,
    status: bytes,
    serve: Callable[..., Service],
    scorer: Scorer,
    rows: list[dict[str, Any]],
) -> None:
    """It is answered, and its connection ends soon."""
    service = serve(HASTY)
    with listening(service) as port:
        deadline = Deadline(5)
        got = rest(opened(port, sent))
        assert got.startswith(b"HTTP/1.1 " + status), got
        assert not deadline.over, deadline
        assert_scored(post(port, one := request(rows, [0, 1])), scorer, one)
    assert service.held == 0


def test_who_has_gone_is_not_scored(
    serve: Callable[..., Service],
    scorer: Scorer,
    rows: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of three requests to a busy scorer the second one's client leaves, and then that of the one
    being scored.
    """
    service, one = serve(HASTY), request(rows, [0, 1])
    go, sizes = held(service, monkeypatch)
    body = json.dumps(one).encode()
    whole = (
        b"POST /rank HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
        % len(body)
        + body
    )

    def until(count: float) -> None:
        gone, deadline = service.metrics.requests.labels("/rank", "499")._value, Deadline(30)
        while len(service.batcher._queue) + gone.get() < count or not sizes:
            assert not deadline.over, deadline
            time.sleep(0.01)

    with listening(service) as port:
        first = opened(port, whole)
        until(0)
        second = opened(port, whole)
        until(1)
        second.close()
        until(2)  # it is gone, and is taken from the queue by whoever comes next
        third = opened(port, whole)
        until(3)
        first.close()
        until(4)
        go.set()
        assert rest(third).startswith(b"HTTP/1.1 200")
    assert sum(sizes) == 2 and service.held == 0 and service.version.held == 0


def test_who_wants_a_websocket_is_answered_as_http(
    serve: Callable[..., Service], caplog: pytest.LogCaptureFixture
) -> None:
    upgrade = (
        b"host: x\r\nconnection: Upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n"
    )
    upgrade += b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    with listening(serve(HASTY)) as port:
        for path, status in ((b"/rank", b"405"), (b"/absent", b"404"), (b"/health/live", b"200")):
            one = opened(port, b"GET %s HTTP/1.1\r\n" % path + upgrade)
            one.sendall(b"\x81\x85\0\0\0\0hello")  # as if it had been accepted
            deadline, got = Deadline(5), rest(one)
            assert got.startswith(b"HTTP/1.1 " + status) and b"application/json" in got, got
            assert not deadline.over, deadline
    assert not [
        record
        for record in caplog.records
        if record.levelname == "ERROR" or "pip install" in record.message
    ]


@pytest.mark.parametrize("trailer", [b"x: y\r\n" * 1000, b"x: " + b"y" * 1000])
def test_trailers_without_end(trailer: bytes, serve: Callable[..., Service]) -> None:
    """After a chunked body headers may come. They count as those before it."""
    with listening(serve(HASTY)) as port:
        one = opened(
            port,
            b"POST /absent HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n0\r\n"
            + trailer,
        )
        deadline, sent = Deadline(5), 0
        try:
            while not deadline.over and sent < 50_000_000:
                one.sendall(trailer * 10)
                sent += 10 * len(trailer)
        except OSError:  # it has been closed
            pass
        rest(one)
        assert sent < 50_000_000


def test_chunks_of_a_body_may_be_many(
    serve: Callable[..., Service], scorer: Scorer, rows: list[dict[str, Any]]
) -> None:
    one = request(rows, [0, 1])
    body = json.dumps(one).encode() + b" " * 20_000
    chunks = b"".join(
        b"%x\r\n%s\r\n" % (len(part), part)
        for part in (body[i : i + 50] for i in range(0, len(body), 50))
    )
    with listening(serve(HASTY)) as port:
        head = (
            b"POST /rank HTTP/1.1\r\nhost: x\r\nconnection: close\r\ntransfer-encoding:"
            b" chunked\r\n\r\n"
        )
        got = rest(opened(port, head + chunks + b"0\r\n\r\n"))
        assert got.startswith(b"HTTP/1.1 200"), got


def test_who_sends_what_belongs_to_no_request(serve: Callable[..., Service]) -> None:
    """After an answer: ends of lines, and the rest of a body that was refused. Neither keeps a
    connection open.
    """
    with listening(serve(HASTY)) as port:
        for sent, after in (
            (b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n", b"\r\n"),
            (b"POST /rank HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n", b"408"),
            (b"POST /absent HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n", b"{"),
        ):
            one = opened(port, sent)
            assert one.recv(1000).startswith(b"HTTP/1.1 ")
            one.sendall(after)
            deadline = Deadline(5)
            rest(one)
            assert not deadline.over, deadline


def test_who_is_cut_off_in_a_body(
    serve: Callable[..., Service], scorer: Scorer, rows: list[dict[str, Any]]
) -> None:
    service = serve(HASTY)
    with listening(service) as port:
        opened(port, b"POST /rank HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{").close()
        assert_scored(post(port, one := request(rows, [0, 1])), scorer, one)
        deadline = Deadline(30)
        while service.held:
            assert not deadline.over, deadline
            time.sleep(0.01)


def test_what_has_not_arrived_takes_nothing_from_others(
    serve: Callable[..., Service], scorer: Scorer, rows: list[dict[str, Any]]
) -> None:
    service = serve(Limits(deadline_ms=60_000, body_mb=0.01, held_mb=0.01))
    with listening(service) as port:
        slow = [
            opened(port, b"POST /rank HTTP/1.1\r\nhost: x\r\ncontent-length: 9999\r\n\r\n{")
            for _ in range(3)
        ]
        assert_scored(post(port, one := request(rows, [0, 1])), scorer, one)
        for other in slow:
            other.close()


def test_who_does_not_read_the_answer(
    serve: Callable[..., Service], scorer: Scorer, rows: list[dict[str, Any]]
) -> None:
    """Is cut off. Its memory and its version are given back."""
    service = serve(HASTY)
    one = json.dumps(request(rows, [0] * 5000)).encode()
    whole = b"POST /rank HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(one) + one
    with listening(service) as port:
        deaf = opened(port, buffer=1024)
        deaf.setblocking(False)
        waiting, deadline = whole * 100, Deadline(30)
        try:
            while not deadline.over:
                try:
                    waiting = waiting[deaf.send(waiting) :]
                except BlockingIOError:
                    time.sleep(0.01)
        except (ConnectionResetError, BrokenPipeError):
            pass
        assert not deadline.over, "it was not cut off"
        deaf.close()
        while service.held or service.version.held:
            assert not deadline.over, deadline
            time.sleep(0.01)
        assert_scored(post(port, one := request(rows, [0, 1])), scorer, one)


def test_one_connection_too_many(
    serve: Callable[..., Service], scorer: Scorer, rows: list[dict[str, Any]]
) -> None:
    """Is told when to try again, and is answered when others have gone."""
    service, one = serve(HASTY), request(rows, [0, 1])
    with listening(service) as port:
        idle = [opened(port) for _ in range(3)]
        got = post(port, one)
        assert (
            got.status == 503
            and got.headers[b"retry-after"] == b"1"
            and "try again" in got.json["error"]
        )
        for other in idle:
            other.close()
        deadline = Deadline(30)
        while (got := post(port, one)).status == 503 and not deadline.over:
            time.sleep(0.01)
        assert_scored(got, scorer, one)


@pytest.mark.slow
def test_five_thousand_connections(
    serve: Callable[..., Service], scorer: Scorer, rows: list[dict[str, Any]]
) -> None:
    """A good client is answered, or told to come back. When they have been cut off, all is as
    before.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= hard < 11_000:
        pytest.skip(f"needs 11,000 open files, of which this user may have {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 11_000), hard))
    service, one = (
        serve(Limits(deadline_ms=60_000, connections=1_000, read_s=5)),
        request(rows, [0, 1]),
    )
    try:
        with listening(service) as port:
            kinds = (
                b"",
                b"POST /rank HTTP/1.1\r\nhost: ",
                b"POST /rank HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n",
            )
            many, answers = [], []
            for number in range(5_000):
                many.append(opened(port, kinds[number % 3]))
                if number % 500 == 0:
                    answers.append(post(port, one))
            for got in answers:
                if got.status != 503:
                    assert_scored(got, scorer, one)
                else:
                    assert got.headers[b"retry-after"] == b"1"
            assert {got.status for got in answers} == {200, 503}
            for other in many:
                assert rest(other)[:12] in (b"HTTP/1.1 408", b"HTTP/1.1 503")
            assert_scored(post(port, one), scorer, one)
        assert service.held == 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
