from __future__ import annotations

import base64
import hashlib
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sparrow.serving import Scorer

pytest.importorskip("starlette", reason="needs the extra [serve]")

from sparrow.apps.service import page
from sparrow.apps.service.app import Service
from tests.apps.service.asking import ask
from tests.apps.service.test_batcher import CLOSE


def test_the_page_allows_its_own_code_and_no_other(service: Service) -> None:
    got = ask(service, "/")
    assert got.status == 200 and got.headers[b"content-type"] == b"text/html; charset=utf-8"
    allowed = dict(
        one.split(" ", 1) for one in got.headers[b"content-security-policy"].decode().split("; ")
    )
    code = got.body.decode().split("<script>")[1].split("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    assert allowed["script-src"] == f"'sha256-{digest}'" and allowed["style-src"].startswith(
        "'sha256-"
    )
    assert allowed["default-src"] == "'none'" and allowed["connect-src"] == "'self'"
    for outside in (b"http:", b"https:", b"src=", b"innerHTML", b"localStorage"):
        assert outside not in got.body, outside


@pytest.mark.parametrize("first", [0, 30, 100, 252, 255])
def test_examples_are_ranked_as_they_are(service: Service, scorer: Scorer, first: int) -> None:
    rows = scorer.golden_rows()[1][first : first + 8]
    got = ask(service, f"/example/{first}")
    asked = got.json
    assert got.status == 200 and len(asked["candidates"]) == len(rows) == min(8, 256 - first)
    assert [asked["user"] | one for one in asked["candidates"]] == rows
    found = ask(service, "/rank", got.body).json["scores"]["label"]
    assert np.abs(np.array(found) - scorer.score(rows)[:, 0]).max() <= CLOSE


def test_rows_that_are_not_kept(service: Service) -> None:
    got = ask(service, "/example/256")
    assert (
        got.status == 404
        and got.json["error"] == "row 256: 256 are kept with the model; the first one is 0"
    )
    assert ask(service, f"/example/{10**30}").status == 404
    assert ask(service, "/example/-1").status == 404


def test_what_json_cannot_say_in_an_example() -> None:
    row = {
        "a": b"\xc3\xbc",
        "b": float("nan"),
        "c": [b"x", None, float("nan")],
        "d": 2**63,
        "e": "</script>",
    }
    kept: Any = SimpleNamespace(golden_rows=lambda: (None, [row, row]))
    made = page.example(kept, 0)
    assert json.loads(made) == {
        "user": {},
        "candidates": (
            2 * [{"a": "ü", "b": None, "c": ["x", None, None], "d": 2**63, "e": "</script>"}]
        ),
    }
    other: Any = SimpleNamespace(golden_rows=lambda: (None, [row, row | {"d": 1}]))
    assert json.loads(page.example(other, 0))["candidates"] == [{"d": 2**63}, {"d": 1}]
