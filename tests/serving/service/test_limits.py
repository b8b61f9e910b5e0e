from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sparrow.core.errors import UserError
from sparrow.serving.service.app import Service
from sparrow.serving.service.limits import Limits, RefusedError
from tests.serving.service.asking import ask
from tests.serving.service.protocols.test_v2 import INFER
from tests.serving.service.test_batcher import request


def test_numbers_out_of_range() -> None:
    for name in (
        "deadline_ms",
        "body_mb",
        "header_kb",
        "read_s",
        "write_s",
        "candidates",
        "queue",
        "columns",
        "values",
    ):
        with pytest.raises(UserError, match=f"{name}: 0 is out of range"):
            Limits(**{name: 0})  # type: ignore[arg-type]
    with pytest.raises(UserError, match="held_mb: 1 is less than body_mb, 4"):
        Limits(held_mb=1)


def test_an_error_is_one_line_that_ends() -> None:
    told = str(RefusedError(400, "a\n b" + "c" * 10_000))
    assert told.startswith("a bccc") and len(told) < 600


def test_columns_and_lists_are_bounded(serve: Callable[..., Service], rows: list[dict[str, Any]]) -> None:
    service = serve(Limits(deadline_ms=60_000, columns=20, values=5, lists=8))
    one = request(rows, [0, 1])
    one["user"] |= {"history": [1] * 5, "tags": ["a"] * 3}
    assert ask(service, "/rank", one).status == 200
    many = {"user": {f"c{i}": 1 for i in range(21)}, "candidates": {}}
    tensors = {"inputs": [{"name": f"c{i}", "datatype": "INT64", "shape": [0], "data": []} for i in range(61)]}
    of_candidates = {"user": {}, "candidates": [{"history": [1] * 3}] * 2 + [{"history": [1] * 6}]}
    for path, body, says in (
        ("/rank", one | {"user": one["user"] | {"history": [1] * 6}}, "column 'history': a list of 6, 5 are allowed"),
        ("/rank", one | {"user": one["user"] | {"tags": ["a"] * 4}}, "lists: 9 values in all, 8 are allowed"),
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


MEASURE = """
import asyncio, json, sys
from sparrow.core.memory import peak_reset, peak_bytes
"""
