"""Bodies with mistakes of every kind, to every protocol: an error or a correct answer, and never
another's score.
"""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import random
import struct
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sparrow.apps.service.app import Service
from sparrow.apps.service.limits import Limits
from sparrow.apps.service.protocols import rank, v2
from sparrow.serving import Scorer
from tests.apps.service.asking import Got, asked
from tests.apps.service.protocols.test_v2 import INFER, LENGTH, USER, tensors, type_of
from tests.apps.service.test_batcher import CLOSE, assert_scored, request

HUGE, DEEP = "@huge@", "@deep@"  # what `json` does not write
ODD: list[Any] = [
    *(
        -1,
        0,
        1,
        3,
        2**31,
        2**32 - 1,
        2**62,
        2**63,
        2**64,
        2**70,
        -(2**63) - 1,
        0.5,
        -0.0,
        1e308,
        1e-320,
    ),
    *(
        float("nan"),
        float("inf"),
        float("-inf"),
        HUGE,
        DEEP,
        None,
        True,
        False,
        "",
        "x",
        "\ud800",
        "\0",
        "\u00e4",
    ),
    *(
        "x" * 3000,
        [],
        {},
        [[]],
        [None],
        [1, 2, 3],
        [[1]] * 3,
        ["a"] * 3,
        {"a": []},
        [2**32, 2**32],
        [-3],
        [3, 0],
    ),
    *(
        [3, 1],
        [0],
        [2**63],
        [],
        "INT64",
        "BYTES",
        "FP16",
        "FP32",
        "BOOL",
        "UINT8",
        "INT8",
        "FP64",
        "BF16",
        "item",
    ),
    *(
        "user",
        "item:null",
        "tags:null",
        "tags:lengths",
        "history:lengths",
        "user:null",
        "label",
        ":null",
        ":lengths",
    ),
]
KEYS = (
    "binary_data_size",
    "binary_data_output",
    "binary_data",
    "timeout",
    "data",
    "shape",
    "datatype",
    "name",
    "id",
)
KEYS += ("outputs", "parameters", "inputs", "user", "candidates", "top", "deadline_ms", "item", "")


def places(node: Any) -> list[tuple[Any, Any]]:
    """Every container below a value, and a key of it."""
    keys = (
        list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
    )
    found = [(node, key) for key in keys]
    for key in keys:
        found += places(node[key])
    return found


def changed(told: dict[str, Any], draw: random.Random) -> None:
    """Replace, remove, repeat or add something."""
    node, key = draw.choice(places(told) or [(told, "inputs")])
    kind = draw.randrange(6)
    if kind == 0 and isinstance(node, list):
        node.insert(key, copy.deepcopy(node[key]))
    elif kind == 1:
        del node[key]
    elif kind == 2 and isinstance(node, dict):
        node[draw.choice(KEYS)] = draw.choice(ODD)
    elif kind == 3:
        node[key] = copy.deepcopy(draw.choice(places(told))[0])
        json.dumps(told)  # refuses what contains itself
    else:
        node[key] = draw.choice(ODD)


def cut(data: bytes, draw: random.Random) -> bytes:
    """Change, remove or add some bytes."""
    at = draw.randrange(len(data) + 1)
    some = draw.choice(
        [
            b"\xff\xff\xff\xff",
            b"\0",
            b"\xc3",
            b"",
            b"[" * 50,
            struct.pack("<I", draw.randrange(70_000)),
        ]
    )
    return data[:at] + some + data[at + draw.choice([0, len(some), 1, 100]) :]


def body_of(told: Any) -> bytes:
    text = (
        json.dumps(told)
        .replace(f'"{HUGE}"', "9" * 5000)
        .replace(f'"{DEEP}"', "[" * 5000 + "]" * 5000)
    )
    return text.encode()


def of_v2(arrays: dict[str, Any], draw: random.Random) -> tuple[bytes, dict[str, Any]]:
    """A body with mistakes, and its headers."""
    told: dict[str, Any] = {
        "inputs": [],
        "id": "1",
        "outputs": [{"name": "label"}],
        "parameters": {"timeout": 10**8},
    }
    parts = []
    for name, a in arrays.items():
        one: dict[str, Any] = {
            "name": name,
            "datatype": type_of(a),
            "shape": list(a.shape),
            "parameters": {},
        }
        if draw.random() < 0.5 and not (a.dtype.kind == "f" and np.isnan(a).any()):
            one["data"] = a.tolist()
        else:
            texts = [str(text).encode() for text in a.tolist()]
            parts.append(
                b"".join(struct.pack("<I", len(t)) + t for t in texts)
                if a.dtype == object
                else a.tobytes()
            )
            one["parameters"]["binary_data_size"] = len(parts[-1])
        told["inputs"].append(one)
    for _ in range(draw.choice([0, 1, 1, 2, 3])):
        try:
            changed(told, draw)
        except (ValueError, RecursionError, TypeError):
            break
    try:
        head = body_of(told)
    except (ValueError, RecursionError):
        head = b"{"
    if draw.random() < 0.1:
        head = cut(head, draw)
    binary = b"".join(parts)
    if draw.random() < 0.2:
        binary = cut(binary, draw)
    length: Any = len(head)
    if draw.random() < 0.1:
        length = draw.choice(
            [-1, 0, length - 1, length + 1, 2**64, 10**30, "x", "", "1_0", " 5", "\xb2", "9" * 5000]
        )
    return head + binary, {LENGTH: length}


def of_rank(one: dict[str, Any], draw: random.Random) -> tuple[bytes, dict[str, Any]]:
    told = copy.deepcopy(one)
    if draw.random() < 0.5:
        told["candidates"] = {
            name: [row[name] for row in told["candidates"]] for name in told["candidates"][0]
        }
    for _ in range(draw.choice([1, 1, 2, 3])):
        try:
            changed(told, draw)
        except (ValueError, RecursionError, TypeError):
            break
    try:
        body = body_of(told)
    except (ValueError, RecursionError):
        body = b"["
    return cut(body, draw) if draw.random() < 0.1 else body, {}


def assert_answer(
    got: Got, body: bytes, headers: dict[str, Any], path: str, service: Service
) -> None:
    """It is an error of one line, or has the scores that the request has alone."""
    if got.status != 200:
        assert got.status in (400, 413, 503), (got, body[:2000])
        told = got.json["error"]
        assert (
            got.headers[b"content-type"] == b"application/json"
            and "\n" not in told
            and 10 < len(told) < 600
        )
        return
    at, limits = service.version, service.limits
    if path == INFER:
        one, _ = v2.parse_request(body, str(headers[LENGTH]).encode("latin-1"), at.sources, limits)
        length = int(got.headers.get(LENGTH.lower().encode(), len(got.body)))
        told = json.loads(got.body[:length])
        for output in told["outputs"]:
            size = output.get("parameters", {}).get("binary_data_size")
            found = (
                np.frombuffer(got.body[length:], "<f4")
                if size
                else np.array(output.get("data", []), np.float32)
            )
    else:
        one, top = rank.parse_request(body, at.sources, limits)
        found = np.array(got.json["scores"]["label"]) if top is None else None
    if one.count and found is not None:
        want = at.scorer.rank(one.user, one.candidates)[:, 0]
        assert found.shape == want.shape and np.abs(found - want).max() <= CLOSE


def fuzzed(
    service: Service, scorer: Scorer, rows: list[dict[str, Any]], cases: int, seed: int
) -> Counter[int]:
    """Send bodies, six at a time, between two good requests. Returns how many of each status there
    were.
    """
    draw, seen = random.Random(seed), Counter[int]()
    some = [{n: row[n] or "" if n.startswith("cat") else row[n] for n in row} for row in rows[:3]]
    good = request(rows, [5, 6, 7], ())
    one = request(rows, [0, 1, 2])

    async def all_of_them() -> None:
        for _ in range(cases // 6):
            bad = []
            for _ in range(6):
                if draw.random() < 0.75:
                    of_user = draw.choice([(), USER])
                    bad.append((INFER, *of_v2(tensors(scorer, some, of_user), draw)))
                else:
                    bad.append(("/rank", *of_rank(one, draw)))
            sent = [
                ("/rank", json.dumps(good).encode(), {}),
                *bad,
                ("/rank", json.dumps(good).encode(), {}),
            ]
            got = await asyncio.gather(*(asked(service, *each) for each in sent))
            assert_scored(got[0], scorer, good)
            assert_scored(got[-1], scorer, good)
            for (path, body, headers), answer in zip(bad, got[1:-1], strict=True):
                assert_answer(answer, body, headers, path, service)
                seen[answer.status] += 1

    asyncio.run(all_of_them())
    return seen


@pytest.mark.parametrize("extra", ["refuse", "ignore"])
@pytest.mark.parametrize("cases", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_fuzzed_bodies(
    cases: int,
    extra: Any,
    serve: Callable[..., Service],
    scorer: Scorer,
    rows: list[dict[str, Any]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    service = serve(Limits(deadline_ms=60_000, body_mb=0.1, held_mb=1, extra=extra))
    with caplog.at_level(logging.WARNING):
        seen = fuzzed(service, scorer, rows, cases, seed=cases)
    batches, scored = (
        service.metrics.registry.get_sample_value(name)
        for name in ("sparrow_batch_requests_count", "sparrow_candidates_count")
    )
    assert batches < scored - cases / 50, "good requests did not share batches with others"
    assert seen[200] > cases / 20 and seen[400] > cases / 3
    assert not caplog.records and service.held == 0 and service.version.held == 0
