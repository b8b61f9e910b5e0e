"""What operators ask is bounded as requests are, against a socket."""

from __future__ import annotations

import time
from typing import Any

import pytest

from sparrow.apps.service.admin import Admin
from sparrow.apps.service.metrics import Metrics
from sparrow.apps.service.scrape import Scrape
from tests.apps.service.asking import listening
from tests.apps.service.test_connections import HASTY, opened, rest
from tests.pace import Deadline

INDEX = b"POST /v2/repository/index HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"


@pytest.fixture
def admin() -> Admin:
    supervisor: Any = None  # it is not asked
    metrics = Metrics()
    return Admin(supervisor, HASTY, metrics, Scrape(metrics.registry))


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"", b"408"),
        (b"GET /metrics HTTP/1.1\r\nhost: x\r\n", b"408"),
        (INDEX + b"content-length: 100\r\n\r\n{", b"408"),
        (INDEX + b"content-length: 4000001\r\n\r\n", b"413"),
        (INDEX + b"x: " + b"y" * 5000, b"431"),
        (INDEX.replace(b"index", b"models/x/load") + b"content-length: 0\r\n\r\n", b"400"),
        (b"POST /metrics HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n", b"405"),
        (b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n", b"200"),
    ],
    ids=lambda value: repr(value[:70]),
)
def test_what_comes_too_slowly_or_is_too_much(sent: bytes, status: bytes, admin: Admin) -> None:
    with listening(admin) as port:
        deadline = Deadline(5)
        got = rest(opened(port, sent))
        assert got.startswith(b"HTTP/1.1 " + status), got
        assert (b"application/json" in got and b"error" in got) == (status != b"200")
        assert not deadline.over, deadline
    assert admin.held == 0


def test_one_connection_too_many(admin: Admin) -> None:
    with listening(admin) as port:
        idle = [opened(port) for _ in range(3)]
        got = rest(opened(port, b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n"))
        assert got.startswith(b"HTTP/1.1 503") and b"retry-after: 1" in got
        for one in idle:
            one.close()
        deadline, asked = Deadline(30), b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n"
        while (got := rest(opened(port, asked))).startswith(b"HTTP/1.1 503") and not deadline.over:
            time.sleep(0.01)
        assert got.startswith(b"HTTP/1.1 200")
