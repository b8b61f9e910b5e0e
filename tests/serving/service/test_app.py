from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparrow.serving import Scorer, load
from sparrow.serving.service.app import Service
from sparrow.serving.service.limits import Limits
from tests.serving.service.asking import UNIX, ask, asked
from tests.serving.service.test_batcher import CLOSE, assert_scored, request


def test_it_says_that_it_lives_and_which_model_answers(service: Service, scorer: Scorer) -> None:
    assert ask(service, "/health/live").json == {"live": True}
    assert ask(service, "/health/ready").json == {"ready": True, "version": scorer.folder.digest}
    assert ask(service, "/v2").json["name"] == "sparrow"


def test_what_is_not_there(service: Service) -> None:
    for path, body in (("/", None), ("/rank", None), ("/v2/models/other", None), ("/control/swap", {"folder": "x"})):
        got = ask(service, path, body)
        assert got.status in (404, 405), path
    assert "only the control socket has it" in ask(service, "/control/swap", {"folder": "x"}).json["error"]
    got = ask(service, "/v2/models/other/infer", {"inputs": []})
    assert got.status == 404 and got.json["error"] == "model 'other': does not answer here; 'model' or 'one' does"
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
    text = ask(service, "/metrics").body.decode()
    for line in (
        'sparrow_requests_total{route="/rank",status="200"} 1.0',
        'sparrow_requests_total{route="/rank",status="400"} 1.0',
        "sparrow_candidates_sum 2.0",
        "sparrow_batch_requests_count 1.0",
        "sparrow_queue_requests 0.0",
        *(f'sparrow_stage_seconds_count{{stage="{stage}"}}' for stage in ("read", "wait", "encode", "score", "write")),
        f'version="{service.version.name}"',
    ):
        assert line in text, line


def test_swaps_under_load(
    models: Path, serve: Callable[..., Service], rows: list[dict[str, Any]], scorer: Scorer
) -> None:
    """Every answer has the scores of the version that it names. After a swap none is of the old one."""
    service, one = serve(threads=2, of=load(models / "one")), request(rows, list(range(20)))
    known = {
        found.folder.digest: found for found in (scorer, load(models / "two"), load(models / "one", [models / "delta"]))
    }
    want = {name: found.rank(one["user"], one["candidates"])[:, 0] for name, found in known.items()}
    assert len(known) == 3 and np.abs(np.subtract(*list(want.values())[:2])).max() > 1e-4
    seen, stop = [], threading.Event()

    async def load_it() -> None:
        while not stop.is_set():
            for got in await asyncio.gather(*(asked(service, "/rank", one) for _ in range(4))):
                assert got.status == 200, got.body
                found = got.json
                seen.append(found["version"])
                assert np.abs(np.array(found["scores"]["label"]) - want[found["version"]]).max() <= CLOSE

    async def swap_them() -> None:
        try:
            for name in ("two", "one", "delta", "one", "two"):
                got = await asked(service, "/control/swap", {"folder": str(models / name)}, server=UNIX)
                assert got.status == 200, got.body
                after = await asked(service, "/rank", one)
                assert after.json["version"] == got.json["version"] == service.version.name
                at = len(seen)
                await asyncio.sleep(0.05)
                assert set(seen[at:]) <= {got.json["version"]}
        finally:
            stop.set()

    async def both() -> None:
        await asyncio.gather(load_it(), load_it(), swap_them())

    asyncio.run(both())
    assert set(seen) == set(known)
    assert 'sparrow_swaps_total{outcome="done"} 5.0' in service.metrics.text().decode()


@pytest.mark.parametrize("name", ["absent", "damaged", "delta of another"])
def test_a_version_that_fails_its_check_is_refused(
    name: str, models: Path, service: Service, rows: list[dict[str, Any]], scorer: Scorer, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    if name == "damaged":
        for path in (models / "two").rglob("*"):
            if path.is_file():
                into = folder / path.relative_to(models / "two")
                into.parent.mkdir(parents=True, exist_ok=True)
                into.write_bytes(path.read_bytes())
        (folder / "dense.safetensors").write_bytes(b"x")
    elif name == "delta of another":
        ask(service, "/control/swap", {"folder": str(models / "two")}, server=UNIX)
        folder = models / "delta"
    before = service.version.name
    got = ask(service, "/control/swap", {"folder": str(folder)}, server=UNIX)
    assert got.status == 400 and str(folder) in got.json["error"]
    assert service.version.name == before
    assert_scored(ask(service, "/rank", one := request(rows, [0])), service.version.scorer, one)


def test_a_swap_needs_a_folder(service: Service) -> None:
    for body in (b"", b"[]", json.dumps({"path": "x"}).encode()):
        got = ask(service, "/control/swap", body, server=UNIX)
        assert got.status == 400 and 'send {"folder": "PATH"}' in got.json["error"]
