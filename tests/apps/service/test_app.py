from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from sparrow.apps.service.app import Service
from sparrow.apps.service.limits import Limits
from sparrow.serving import Scorer
from tests.apps.service.asking import ask, counted
from tests.apps.service.test_batcher import request


def test_it_says_that_it_lives_and_which_model_answers(service: Service, scorer: Scorer) -> None:
    assert ask(service, "/health/live").json == {"live": True}
    assert ask(service, "/health/ready").json == {"ready": True, "version": scorer.folder.digest}
    assert ask(service, "/v2").json["name"] == "sparrow"


def test_what_is_not_there(service: Service) -> None:
    """It is told as other errors are, and counted by routes, of which callers make none."""
    for path, method, status, says in (
        ("/other", "GET", 404, "GET '/other': nothing is there; see docs/serving.md"),
        ("/rank/", "POST", 404, "POST '/rank/': nothing is there"),
        ("/control/swap", "POST", 404, "nothing is there"),
        ("/example/x", "GET", 404, "nothing is there"),
        ("/example/" + "9" * 5000, "GET", 404, "nothing is there|9999 ..."),
        ("/rank", "GET", 405, "GET '/rank': send POST"),
        ("/rank", "ODD", 405, "ODD '/rank': send POST"),
        ("/health/live", "POST", 405, "POST '/health/live': send GET"),
        ("/v2/models/other", "GET", 404, "model 'other'"),
    ):
        got = ask(service, path, None, {"X-Request-Id": "mine"}, method)
        assert got.status == status and re.search(says, got.json["error"]), got
        assert (
            got.headers[b"x-request-id"] == b"mine"
            and got.headers[b"content-type"] == b"application/json"
        )
        assert got.headers.get(b"allow") == (
            None if status == 404 else b"POST" if "/rank" in path else b"GET, HEAD"
        )
    assert ask(service, "/health/live", method="HEAD").status == 200
    text = counted(service)
    for route, status, count in (("other", 404, 5), ("/rank", 405, 2), ("/health/live", 405, 1)):
        assert f'sparrow_requests_total{{route="{route}",status="{status}"}} {count}.0' in text
    routes = set(re.findall(r'route="([^"]*)"', text))  # numbers may have any digits
    assert not [route for route in routes if "9999" in route] and "ODD" not in text
    got = ask(service, "/v2/models/other/infer", {"inputs": []})
    assert (
        got.status == 404
        and got.json["error"] == "model 'other': does not answer here; 'model' or 'one' does"
    )
    assert ask(service, "/v2/models/model/versions/1").status == 404


def test_bodies_are_bounded(serve: Callable[..., Service], rows: list[dict[str, Any]]) -> None:
    service = serve(Limits(deadline_ms=60_000, body_mb=0.01, held_mb=0.011, candidates=5))
    assert ask(service, "/rank", b" " * 20_000).status == 413
    lying = ask(service, "/rank", b" " * 20_000, {"content-length": 10})
    assert lying.status == 413 and "more than 0.01 MB" in lying.json["error"]
    many = ask(service, "/rank", request(rows, [0] * 6))
    assert many.status == 413 and "candidates: 6 of them, 5 are allowed" in many.json["error"]
    assert ask(service, "/rank", b"{}", {"content-encoding": "gzip"}).status == 415
    service.held = 10_000
    got = ask(service, "/rank", b" " * 5_000)
    assert got.status == 429 and got.headers[b"retry-after"] == b"1"
    assert service.held == 10_000


def test_metrics_count_answers_and_stages(service: Service, rows: list[dict[str, Any]]) -> None:
    ask(service, "/rank", request(rows, [0, 1]))
    ask(service, "/rank", b"no json")
    text = counted(service)
    for line in (
        'sparrow_requests_total{route="/rank",status="200"} 1.0',
        'sparrow_requests_total{route="/rank",status="400"} 1.0',
        "sparrow_candidates_sum 2.0",
        "sparrow_batch_requests_count 1.0",
        "sparrow_queue_requests 0.0",
        *(
            f'sparrow_stage_seconds_count{{stage="{stage}"}}'
            for stage in ("read", "wait", "encode", "score", "write")
        ),
    ):
        assert line in text, line
