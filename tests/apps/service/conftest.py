from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from sparrow.apps.bits.quantize import quantize
from sparrow.layers.precision import Precision
from sparrow.models import dcnv2, wukong
from sparrow.serving import Scorer, load
from sparrow.serving.export import export
from sparrow.trained.run import Loop
from sparrow.training import train
from tests.apps.service.asking import Server
from tests.runs import small_run

pytest.importorskip("starlette", reason="needs the extra [serve]")

from sparrow.apps.service.app import Service
from sparrow.apps.service.limits import Limits
from sparrow.apps.service.lookups.items import Items
from sparrow.apps.service.settings import Settings
from sparrow.apps.service.versions import Versions

PATIENT = Limits(deadline_ms=60_000)  # a busy machine is slow


@pytest.fixture(scope="session")
def models(prepared: Path, log: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two models, `one` and `two`, and `delta`, which follows `one`."""
    place = tmp_path_factory.mktemp("models")
    for name, steps in (("one", 2), ("two", 5)):
        train(small_run(prepared, place / f"run_{name}", loop=Loop(max_steps=steps)))
        export(place / f"run_{name}", place / name, [log])
    export(place / "run_two", place / "delta", [log], base=[place / "one"])
    return place


@pytest.fixture(scope="session")
def scorer(models: Path) -> Scorer:
    return load(models / "one")


@pytest.fixture(scope="session", params=["dcnv2", "wukong", "int8", "bf16"])
def other(
    request: pytest.FixtureRequest,
    models: Path,
    prepared: Path,
    log: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Scorer:
    """A scorer of another model in fp32, or of one with products in few bits."""
    name, place = request.param, tmp_path_factory.mktemp(request.param)
    if name in ("int8", "bf16"):
        few = quantize(
            models / "one", place / name, prepared, budget=math.inf, products=name, rows=600
        )
        assert {part["format"] for part in few.parts if part["kind"] == "product"} == {name}
        return few.scorer
    model = (
        dcnv2.Config(dim=4, deep=(8,))
        if name == "dcnv2"
        else wukong.Config(dim=4, bottom=(8,), mlp=(8,), top=(8,))
    )
    train(small_run(prepared, place / "run", model=model, loop=Loop(max_steps=3)))
    export(place / "run", place / name, [log])
    return load(place / name)


@pytest.fixture(scope="session")
def mixed(prepared: Path, log: Path, tmp_path_factory: pytest.TempPathFactory) -> Scorer:
    """A model in fp8, whose activations have one scale a product."""
    place = tmp_path_factory.mktemp("mixed")
    model = dcnv2.Config(dim=4, deep=(8,))
    train(
        small_run(
            prepared,
            place / "run",
            model=model,
            loop=Loop(max_steps=12),
            precision=Precision("fp8"),
        )
    )
    export(place / "run", place / "model", [log])
    return load(place / "model")


@pytest.fixture(scope="session")
def rows(log: Path, scorer: Scorer) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (
        pq.read_table(log).slice(5900).select(list(scorer.encoder.sources)).to_pylist()
    )
    return found


@pytest.fixture
def serve(scorer: Scorer) -> Iterator[Callable[..., Service]]:
    """Make services, which end with the test."""
    made: list[Service] = []

    def serve(
        limits: Limits = PATIENT, of: Scorer = scorer, items: Items | None = None, **settings: Any
    ) -> Service:
        made.append(Service(Versions(of, items), limits, Settings(**settings)))
        return made[-1]

    yield serve
    for service in made:
        service.batcher.close()


@pytest.fixture
def started() -> Iterator[Callable[..., Server]]:
    """Start processes of `sparrow serve`, which end with the test."""
    servers: list[Server] = []

    def start(*given: Any, **named: Any) -> Server:
        servers.append(Server(*given, **named))
        return servers[-1]

    yield start
    for server in servers:
        server.process.kill()
        server.process.communicate()


@pytest.fixture
def service(serve: Callable[..., Service]) -> Service:
    return serve()
