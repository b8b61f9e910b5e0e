from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sparrow.apps.service import logs
from sparrow.apps.service.app import Service
from sparrow.apps.service.logs import Lines, Logs, request_id, trace_id
from sparrow.core.errors import UserError
from tests.apps.service.asking import ask
from tests.apps.service.protocols.test_v2 import INFER, as_json, tensors
from tests.apps.service.test_batcher import request

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture
def loggers() -> Iterator[None]:
    """A test may start logs; later ones find loggers as they were."""
    root, before = logging.getLogger(), (logging.getLogger().handlers[:], logging.getLogger().level)
    root.handlers.clear()  # those of pytest, which `start` would close
    yield
    root.handlers[:], level = before
    root.setLevel(level)
    logging.getLogger("sparrow").setLevel(logging.NOTSET)
    logs.access.setLevel(logging.NOTSET)


@pytest.fixture
def lines(loggers: None, monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What is written to standard error with an access log."""
    written = io.StringIO()
    monkeypatch.setattr(sys, "stderr", written)
    logs.start(Logs(access_log=True))
    return written


def events(lines: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines.getvalue().splitlines()]


def test_an_answer_is_a_line(
    lines: io.StringIO, service: Service, rows: list[dict[str, Any]]
) -> None:
    given = {"X-Request-Id": "mine-1", "traceparent": f"00-{TRACE}-{PARENT}-01"}
    got = ask(service, "/rank", request(rows, [0, 1]), given)
    bad = ask(service, "/rank", b'{"a\nb": 1}', {"X-Request-Id": "x\ny", "traceparent": "no"})
    ask(service, "/absent", None, {"X-Request-Id": "mine-2"})
    first, second, third = events(lines)
    assert third.items() >= {"route": "other", "status": "404", "request_id": "mine-2"}.items()
    assert got.headers[b"x-request-id"] == b"mine-1"
    assert (
        first.items()
        >= {
            "level": "info",
            "logger": "sparrow.access",
            "event": "request",
            "route": "/rank",
            "status": "200",
            "request_id": "mine-1",
            "trace_id": TRACE,
            "candidates": 2,
            "version": service.version.name,
        }.items()
    )
    assert first["ms"] > 0 and first["bytes"] > 0 and first["time"].endswith("+00:00")
    assert (
        second["request_id"] == bad.headers[b"x-request-id"].decode()
        and len(second["request_id"]) == 16
    )
    assert second["status"] == "400" and "trace_id" not in second and "version" not in second


def test_it_is_off_unless_asked_for(
    loggers: None, capfd: Any, service: Service, rows: list[dict[str, Any]]
) -> None:
    logs.start(logs.Logs())
    assert not logs.access.isEnabledFor(logging.INFO)
    ask(service, "/rank", request(rows, [0]))
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("where", ["scored", "elsewhere"])
def test_a_failure_is_found_by_its_id(
    where: str, lines: io.StringIO, service: Service, rows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*given: Any) -> None:
        raise RuntimeError("a cable")

    if where == "scored":
        monkeypatch.setattr(type(service.version.scorer), "crossed", fails)
    else:
        monkeypatch.setattr(service.batcher, "put", fails)
    got = ask(service, "/rank", request(rows, [0]), {"X-Request-Id": "mine-2"})
    assert got.status == 500 and got.json == {"error": "the service failed, and its log says why"}
    assert got.headers[b"x-request-id"] == b"mine-2"
    error, answer = events(lines)
    assert error["level"] == "error" and error["request_id"] == answer["request_id"] == "mine-2"
    assert "RuntimeError: a cable" in error["exception"]


def test_the_id_of_a_body_is_taken_too(
    service: Service, scorer: Any, rows: list[dict[str, Any]]
) -> None:
    body = as_json(tensors(scorer, [row for row in rows if row["num_0"] is not None][:2]))
    assert (
        ask(service, INFER, body | {"id": "of the body"}).headers[b"x-request-id"] == b"of the body"
    )
    both = ask(service, INFER, body | {"id": "of the body"}, {"X-Request-Id": "of the header"})
    assert both.headers[b"x-request-id"] == b"of the header" and both.json["id"] == "of the body"
    for odd in ("é", "\ud800", "x\r\ny: z"):
        got = ask(service, INFER, body | {"id": odd})
        assert got.status in (200, 400) and len(got.headers[b"x-request-id"]) == 16


def test_ids_of_requests() -> None:
    assert request_id(b"a b~!") == "a b~!" and request_id(None, b"second") == "second"
    assert request_id(b"x" * 128) == "x" * 128
    for bad in (
        b"",
        b"x" * 129,
        b"a\r\nset-cookie: b",
        b"\x7f",
        "é".encode(),
        b"a\n",
        b" a",
        b"a ",
    ):
        assert request_id(bad) != bad.decode("latin-1") and len(request_id(bad)) == 16, bad
    assert request_id(None) != request_id(None)


def test_traceparent_as_its_specification_says() -> None:
    assert trace_id(f"00-{TRACE}-{PARENT}-00".encode()) == TRACE
    assert trace_id(f"cc-{TRACE}-{PARENT}-01-what-a-later-version-adds".encode()) == TRACE
    assert trace_id(f"cc-{TRACE}-{PARENT}-01".encode()) == TRACE
    for bad in (
        f"ff-{TRACE}-{PARENT}-01",
        f"00-{TRACE}-{PARENT}-01-more",
        f"cc-{TRACE}-{PARENT}-01.more",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{PARENT}-01",
        f"00-{TRACE}-{PARENT}",
        f"00-{TRACE}-{PARENT}-1",
        f"0-{TRACE}-{PARENT}-01",
        "",
    ):
        assert trace_id(bad.encode()) is None, bad
    assert trace_id(None) is None


def test_a_line_holds_whatever_is_logged() -> None:
    told = {
        "msg": "two\nlines \ud800 %s",
        "args": ("é",),
        "path": Path("x"),
        "number": float("nan"),
    }
    line = Lines().format(logging.makeLogRecord(told))
    assert "\n" not in line and line.isascii()
    assert json.loads(line)["event"] == "two\nlines \ud800 é" and json.loads(line)["path"] == "x"


def test_shares_are_checked() -> None:
    for sample in (0.0, 1.5, float("nan")):
        with pytest.raises(UserError, match="sample: .* is out of range"):
            Logs(served_log=Path("x"), sample=sample)
