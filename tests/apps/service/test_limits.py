from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from sparrow.apps.service.app import Service
from sparrow.apps.service.limits import Limits, RefusedError
from sparrow.core.errors import UserError
from tests.apps.service.asking import ask
from tests.apps.service.protocols.test_v2 import INFER
from tests.apps.service.test_batcher import request


def test_numbers_out_of_range() -> None:
    counts = ("candidates", "queue", "columns", "list_values", "all_values")
    for name in ("deadline_ms", "body_mb", "header_kb", "read_s", "write_s", *counts):
        with pytest.raises(UserError, match=f"{name}: 0 is out of range"):
            Limits(**{name: 0})  # type: ignore[arg-type]
    with pytest.raises(UserError, match="held_mb: 1 is less than body_mb, 4"):
        Limits(held_mb=1)


def test_an_error_is_one_line_that_ends() -> None:
    told = str(RefusedError(400, "a\n b" + "c" * 10_000))
    assert told.startswith("a bccc") and len(told) < 600


def test_columns_and_lists_are_bounded(
    serve: Callable[..., Service], rows: list[dict[str, Any]]
) -> None:
    service = serve(Limits(deadline_ms=60_000, columns=20, list_values=5, all_values=8))
    one = request(rows, [0, 1])
    one["user"] |= {"history": [1] * 5, "tags": ["a"] * 3}
    assert ask(service, "/rank", one).status == 200
    many = {"user": {f"c{i}": 1 for i in range(21)}, "candidates": {}}
    tensors = {
        "inputs": [
            {"name": f"c{i}", "datatype": "INT64", "shape": [0], "data": []} for i in range(61)
        ]
    }
    of_candidates = {"user": {}, "candidates": [{"history": [1] * 3}] * 2 + [{"history": [1] * 6}]}
    for path, body, says in (
        (
            "/rank",
            one | {"user": one["user"] | {"history": [1] * 6}},
            "column 'history': a list of 6, 5 are allowed",
        ),
        (
            "/rank",
            one | {"user": one["user"] | {"tags": ["a"] * 4}},
            "lists: 9 values in all, 8 are allowed",
        ),
        ("/rank", many, "columns: 21 of them, 20 are allowed"),
        (INFER, tensors, "inputs: 61 of them, 60 are allowed"),
    ):
        got = ask(service, path, body)
        assert got.status == 413 and says in got.json["error"], got.json
    with pytest.raises(RefusedError, match="column 'history': a list of 6"):
        lists = {name: [row[name] for row in of_candidates["candidates"]] for name in ("history",)}
        service.limits.check_lists({}, lists, ["history"])


def test_headers_are_bounded(serve: Callable[..., Service]) -> None:
    service = serve(Limits(header_kb=1))
    got = ask(service, "/v2", None, {"x": "y" * 1000})
    assert got.status == 431 and "headers: more than 1 kB" in got.json["error"]


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "zstd", "x" * 100])
def test_nothing_is_unpacked(coding: str, service: Service) -> None:
    """A small body that would unpack to much."""
    got = ask(service, "/rank", b"\x1f\x8b" + b"\0" * 10, {"Content-Encoding": coding})
    assert got.status == 415 and "bodies are not unpacked here" in got.json["error"]


SERVER = """
import sys, uvicorn
from sparrow.serving import load
from sparrow.apps.service.app import Service, app
from sparrow.apps.service.connections import bounded
from sparrow.apps.service.limits import Limits
from sparrow.apps.service.settings import Settings
from sparrow.apps.service.versions import Versions
limits = Limits(deadline_ms=60_000, body_mb=4, held_mb=16, read_s=60)
service = Service(Versions(load(sys.argv[1])), limits, Settings())
uvicorn.run(app(service), port=int(sys.argv[2]), log_config=None, http=bounded(limits))
"""


def _of(process: subprocess.Popen[bytes], name: str) -> int:
    """A line of a process's status in megabytes."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(status.partition(name + ":")[2].split()[0]) // 1000


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_bounded(models: Path, rows: list[dict[str, Any]]) -> None:
    """Bodies of the most costly kinds, as many and as large as may be. The most memory is what is
    said at the start.
    """
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    process = subprocess.Popen([sys.executable, "-c", SERVER, str(models / "one"), str(port)])

    def post(body: bytes, path: str = "/rank") -> int:
        connection = HTTPConnection("127.0.0.1", port, timeout=120)
        try:
            connection.request("POST", path, body)
            return connection.getresponse().status
        finally:
            connection.close()

    def filled(head: str, unit: str, tail: str) -> bytes:
        return (head + (unit * ((3_990_000 - len(head)) // len(unit)))[:-1] + tail).encode()

    try:
        end = time.monotonic() + 60
        while True:
            try:
                post(json.dumps(request(rows, list(range(100)) * 50)).encode())
                break
            except OSError:
                assert time.monotonic() < end
                time.sleep(0.1)
        long = request(rows, [0] * 5_000)
        for row in long["candidates"]:
            row |= {name: "x" * 60 for name in row if name.startswith("cat")}
        tensor = '{"inputs":[{"name":"item","datatype":"BYTES","shape":[1],"data":['
        names = ",".join(f'"{i:x}":[]' for i in range(300_000))
        bodies = {
            "rows of lists": (filled('{"candidates":[', '{"":[]},', "]}"), 413),
            "lists": (filled('{"candidates":{"item":[', "[0],", "]}}"), 413),
            "columns": (f'{{"candidates":{{{names}}}}}'.encode(), 413),
            "deep": (b"[" * 1_900_000 + b"]" * 1_900_000, 400),
            "candidates": (json.dumps(long).encode(), 200),
            "tensors": (filled(tensor, "[0],", "]}]}"), 400),
        }
        before, grown = _of(process, "VmRSS"), {}
        for name, (body, status) in bodies.items():
            assert len(body) <= 4_000_000
            Path(f"/proc/{process.pid}/clear_refs").write_text("5")
            path = INFER if name == "tensors" else "/rank"
            with ThreadPoolExecutor(4) as pool:
                assert set(
                    pool.map(lambda _, body=body, path=path: post(body, path), range(4))
                ) <= {status, 429}
            grown[name] = _of(process, "VmHWM") - before
        assert max(grown.values()) <= Limits(body_mb=4, held_mb=16).memory_mb, grown
        assert max(grown.values()) >= 100, grown
    finally:
        process.kill()
        process.communicate()
