"""Vectors and crosses in a service: a request in any form has the scores of a scorer in Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparrow import data
from sparrow.core import UserError
from sparrow.features.schema import Column, Encoding, Schema
from sparrow.serving import Scorer, load
from sparrow.serving.export import export
from sparrow.training import train
from tests.equivalence.test_vectors import SIZE, raw, write
from tests.runs import run_of

pytest.importorskip("starlette", reason="needs the extra [serve]")

from sparrow.apps.service.app import Service
from sparrow.apps.service.lookups.items import Items
from sparrow.apps.service.settings import Settings
from sparrow.apps.service.versions import Versions
from tests.apps.service.asking import ask
from tests.apps.service.conftest import PATIENT

COUNT = 20


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> Scorer:
    place = tmp_path_factory.mktemp("asked")
    columns = raw(800) | {
        "item": [f"i{i % 30}" for i in range(800)],
        "kind": [f"k{i % 30 % 4}" for i in range(800)],
    }
    log = write(place / "log.parquet", columns)
    schema = Schema(
        columns={
            "click": Column(kind="label"),
            "user": Column(kind="categorical", table="user"),
            "item": Column(kind="categorical", table="item"),
            "kind": Column(kind="categorical", table="kind"),
            "n": Column(kind="numeric"),
            "seen": Column(kind="numeric", source="user", counts="seen"),
            "emb": Column(kind="vector"),
            "rate": Column(kind="numeric", source="item", counts="rate"),
            "pair": Column(kind="categorical", table="pair", cross=("user", "item")),
            "own": Column(kind="categorical", table="own", cross=("item", "kind")),
        },
        encodings={name: Encoding(min_count=1) for name in ("user", "item", "kind", "pair", "own")},
    )
    data.prepare([log], place / "prepared", schema=schema)
    train(
        run_of(
            place / "prepared",
            place / "run",
            **{"model.name": "dcnv2", "model.dim": 4, "data.batch_size": 50},
        )
    )
    export(place / "run", place / "model", [log])
    return load(place / "model")


def candidates() -> dict[str, list[Any]]:
    """Of a request: the third one has no vector."""
    x_BS = np.random.default_rng(9).normal(3, 1, (COUNT, SIZE)).astype(np.float32).tolist()
    items = [f"i{i}" for i in range(COUNT)]
    return {
        "item": items,
        "kind": [f"k{i % 4}" for i in range(COUNT)],
        "emb": [*x_BS[:2], None, *x_BS[3:]],
    }


def service_of(scorer: Scorer, items: Items | None = None) -> Service:
    return Service(Versions(scorer, items), PATIENT, Settings())


USER = {"user": 7, "n": 0.5}


def expected(scorer: Scorer) -> np.ndarray:
    return scorer.rank(USER, candidates())[:, 0]


def test_rank_infer_and_explain(scorer: Scorer) -> None:
    service, wanted = service_of(scorer), expected(scorer)
    try:
        told = ask(service, "/rank", {"user": USER, "candidates": candidates()}).json
        assert np.abs(np.array(told["scores"]["click"]) - wanted).max() < 1e-6
        assert told["missing"] == {"emb": 1}
        flat = [number for vector in candidates()["emb"] for number in vector or ()]
        lengths = [len(vector or ()) for vector in candidates()["emb"]]
        tensors = {
            "user": ("INT64", [7]),
            "n": ("FP32", [0.5]),
            "item": ("BYTES", candidates()["item"]),
            "kind": ("BYTES", candidates()["kind"]),
            "emb": ("FP32", flat),
            "emb:lengths": ("INT64", lengths),
        }
        inputs = [
            {"name": n, "datatype": kind, "shape": [len(x)], "data": x}
            for n, (kind, x) in tensors.items()
        ]
        made = ask(service, "/v2/models/model/infer", {"inputs": inputs}).json
        assert "error" not in made, made
        assert np.abs(np.array(made["outputs"][0]["data"]) - wanted).max() < 1e-6
        inputs_of = {
            one["name"]: one["datatype"] for one in ask(service, "/v2/models/model").json["inputs"]
        }
        assert (
            set(inputs_of) == set(tensors)
            and inputs_of["emb"] == "FP32"
            and inputs_of["emb:lengths"] == "INT64"
        )
        features = ask(service, "/explain/2", {"user": USER, "candidates": candidates()}).json[
            "features"
        ]
        vector = next(one for one in features if one["feature"] == "emb")
        assert (
            vector["odd"] == {"missing": 1}
            and vector["kind"] == "vector"
            and len(vector["became"]) == SIZE
        )
        assert {one["feature"] for one in features} == {
            "user",
            "item",
            "kind",
            "n",
            "emb",
            "seen",
            "rate",
        }
        described = ask(service, "/openapi.json").json["paths"]["/rank"]["post"]["requestBody"]
        user = described["content"]["application/json"]["schema"]["properties"]["user"][
            "properties"
        ]
        assert user["emb"]["minItems"] == user["emb"]["maxItems"] == SIZE and set(user) == set(
            scorer.encoder.sources
        )
        wrong = {"user": USER, "candidates": candidates() | {"emb": [[0.5]] * COUNT}}
        got = ask(service, "/rank", wrong)
        assert (
            got.status == 400
            and "a vector of 1 numbers where others have 6; give a list of 6" in got.json["error"]
        )
    finally:
        service.batcher.close()


def test_a_catalogue_has_vectors_and_crosses_of_its_own_columns(
    scorer: Scorer, tmp_path: Path
) -> None:
    columns = candidates()
    pq.write_table(pa.table(columns), tmp_path / "items.parquet")
    service, wanted = (
        service_of(scorer, Items(tmp_path / "items.parquet", "item", tmp_path)),
        expected(scorer),
    )
    try:
        told = ask(service, "/rank", {"user": USER, "candidates": {"item": columns["item"]}}).json
        assert np.abs(np.array(told["scores"]["click"]) - wanted).max() < 1e-6
        assert told["missing"] == {"emb": 1} and set(told["unknown"]) <= {"pair"}
        both = {"item": columns["item"], "emb": columns["emb"][::-1]}
        other = ask(service, "/rank", {"user": USER, "candidates": both}).json["scores"]["click"]
        assert np.abs(np.array(other) - scorer.rank(USER, columns | both)[:, 0]).max() < 1e-6
        nobody = ask(service, "/rank", {"user": USER, "candidates": {"item": ["nobody"]}}).json
        alone = scorer.rank(USER, {"item": ["nobody"], "kind": [None], "emb": [None]})[0, 0]
        assert abs(nobody["scores"]["click"][0] - alone) < 1e-6
    finally:
        service.batcher.close()


def test_a_catalogue_cannot_have_half_of_a_cross(scorer: Scorer, tmp_path: Path) -> None:
    table = pa.table({"key": [1, 2], "item": ["i1", "i2"]})
    pq.write_table(table, tmp_path / "items.parquet")
    with pytest.raises(
        UserError,
        match=r"columns\.pair: made of 'item', which the catalogue has, and of what it does",
    ):
        Versions(scorer, Items(tmp_path / "items.parquet", "key", tmp_path))
