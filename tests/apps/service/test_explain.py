from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sparrow.serving import Scorer, load
from sparrow.serving.export import export
from sparrow.training import train
from tests.runs import small_run
from tests.serving.test_requests import FAST, KNOWN, TRANSFORMS
from tests.serving.test_scorer import log_with_all_columns

pytest.importorskip("starlette", reason="needs the extra [serve]")

from sparrow.apps.service.app import Service
from sparrow.apps.service.explain import describe_features
from sparrow.apps.service.limits import Limits
from sparrow.serving.values import missing_together
from tests.apps.service.asking import Got, ask, counted, together
from tests.apps.service.test_batcher import CLOSE, assert_scored, request


@pytest.fixture(scope="session")
def two_labels(tmp_path_factory: pytest.TempPathFactory) -> Scorer:
    """A model with two labels, lists as text, lists with weights, hashed ids and buckets."""
    folder = tmp_path_factory.mktemp("two_labels")
    train(small_run(log_with_all_columns(folder, labels=2), folder / "run"))
    export(folder / "run", folder / "model", [folder / "log.parquet"])
    return load(folder / "model")


def assert_explains(got: Got, scorer: Scorer, row: dict[str, Any], candidate: int) -> None:
    """It has the scores that the scorer gives to a row without each of its columns."""
    assert got.status == 200, got.body
    told = got.json
    assert (told["version"], told["candidate"]) == (scorer.folder.digest, candidate)
    assert {one["column"] for one in told["features"]} == set(scorer.encoder.sources) - {"w"}

    def is_near(found: dict[str, float], row: dict[str, Any]) -> bool:
        return bool(
            np.abs(np.array([found[name] for name in scorer.labels]) - scorer.score([row])).max()
            <= CLOSE
        )

    assert is_near(told["scores"], row)
    for one in told["features"]:
        # a list and its weights are one thing
        beside = {"w": None} if one["column"] == "weighted" else {}
        assert is_near(one["without"], row | {one["column"]: None} | beside), one
        assert one["value"] == row[one["column"]]
    assert any(
        abs(one["without"][label] - told["scores"][label]) > 1e-4
        for one in told["features"]
        for label in one["without"]
    )


def test_scores_without_a_column_are_the_scorers(
    service: Service,
    scorer: Scorer,
    rows: list[dict[str, Any]],
    serve: Callable[..., Service],
    two_labels: Scorer,
) -> None:
    one = request(rows, [3, 5, 9])
    for candidate in range(3):
        assert_explains(
            ask(service, f"/explain/{candidate}", one),
            scorer,
            one["user"] | one["candidates"][candidate],
            candidate,
        )
    whole = two_labels.golden_rows()[1][10:14]
    turned = {name: [row[name] for row in whole] for name in whole[0]}
    assert_explains(
        ask(serve(of=two_labels), "/explain/2", {"candidates": turned, "top": 1}),
        two_labels,
        whole[2],
        2,
    )


def test_requests_beside_it_do_not_change(
    service: Service, scorer: Scorer, rows: list[dict[str, Any]]
) -> None:
    one, whole = request(rows, [1, 2]), {"candidates": rows[4:7]}
    asked = [
        ("/rank", one),
        ("/explain/1", one),
        ("/rank", whole),
        ("/explain/2", whole),
        ("/rank", one),
    ] * 3
    for (path, body), got in zip(asked, together(service, asked), strict=True):
        if path == "/rank":
            assert_scored(got, scorer, {"user": {}, **body})
        else:
            candidate = int(path[-1])
            row = body.get("user", {}) | body["candidates"][candidate]
            assert_explains(got, scorer, row, candidate)


def test_what_is_refused(serve: Callable[..., Service], rows: list[dict[str, Any]]) -> None:
    one, service = request(rows, [0, 1]), serve()
    got = ask(service, "/explain/2", one)
    assert (
        got.status == 400
        and got.json["error"] == "candidate 2: the request has 2; the first one is 0"
    )
    assert ask(service, "/explain/0", {"candidates": {name: [] for name in rows[0]}}).status == 400
    assert ask(service, "/explain/0", b"no json").status == 400
    assert ask(service, "/explain/first", one).status == 404
    long = {"candidates": [rows[0] | {"history": [7] * 20_000}]}
    small = serve(Limits(list_values=100_000, deadline_ms=60_000, body_mb=0.1))
    assert ask(small, "/rank", long).status == 200
    got = ask(small, "/explain/0", long)
    assert got.status == 413 and "shorten its lists" in got.json["error"]
    few = serve(Limits(deadline_ms=60_000, candidates=5))
    assert ask(few, "/rank", one).status == 200 and ask(few, "/explain/0", one).status == 413
    got = ask(serve(Limits(deadline_ms=1e-6)), "/explain/0", one)
    assert got.status == 503 and got.headers[b"retry-after"] == b"1"


def test_what_is_missing_on_purpose_is_not_counted(
    service: Service, rows: list[dict[str, Any]]
) -> None:
    one, odd = request(rows, [0]), "sparrow_odd_values_total{"
    one["user"] |= {"history": []}
    ask(service, "/explain/0", one)
    assert odd not in counted(service)
    ask(service, "/rank", one)
    assert odd in counted(service)


PLAIN = {
    "word": "a",
    "known": "b",
    "hashed": 5,
    "n": 4,
    "bucket": 1.0,
    "words": ["a"],
    "commas": "a,b",
    "json": '["a"]',
    "numbers": [4],
    "weighted": ["a"],
    "w": [0.5],
    "colons": "a:2",
    "plain": 3.0,
    "x": 1.0,
    "log": 2.0,
}
ODD: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "nothing": ({}, {}),
    "missing ids": (
        {"word": None, "known": "?", "hashed": None},
        dict.fromkeys(("word", "known", "hashed", "seen", "rate"), "1 missing"),
    ),
    "unknown ids": ({"word": "nobody", "n": 99}, dict.fromkeys(("word", "number"), "1 unknown")),
    "hashes know any id": ({"hashed": "nobody"}, {}),
    "a bucket": ({"bucket": None}, {"bucket": "1 missing"}),
    "beyond the buckets": ({"bucket": 1e9}, {}),
    "empty lists": ({"words": [], "commas": ""}, dict.fromkeys(("words", "commas"), "1 missing")),
    "no lists": (
        {"words": None, "numbers": [None]},
        dict.fromkeys(("words", "numbers"), "1 missing"),
    ),
    "a longer list": ({"words": ["x", "y", *KNOWN[:3]]}, {"words": "2 cut"}),
    "a list as long": ({"words": KNOWN[:3]}, {}),
    "a longer text": ({"words": "a b c d"}, {"words": "2 unknown, 1 cut"}),
    "gaps in a list": (
        {"words": ["a", None, "no", None, "a", "b"]},
        {"words": "2 missing, 1 unknown, 1 cut"},
    ),
    "with weights": (
        {"weighted": ["a", "no", "b"], "w": [1, 2, 3]},
        {"weighted": "1 unknown, 1 cut"},
    ),
    "too large": ({"log": 60.5, "x": 1e6}, dict.fromkeys(("log", "x"), "1 clipped")),
    "too small": ({"log": -51}, {"log": "1 clipped"}),
    "at the end": ({"log": 60.0}, {}),
    "no number": (
        {"x": "?", "log": None, "plain": None},
        dict.fromkeys(("x", "log2", "log", "plain"), "1 missing"),
    ),
    "written as missing": ({"x": -1}, dict.fromkeys(("x", "log2"), "1 missing")),
    "not a number": ({"plain": float("nan")}, {"plain": "1 missing"}),
}


@pytest.mark.parametrize("name", ODD)
def test_what_is_odd_about_a_value(name: str) -> None:
    changed, odd = ODD[name]
    found = {
        one["feature"]: one["odd"] for one in describe_features(TRANSFORMS, FAST, PLAIN | changed)
    }
    told = {
        feature: ", ".join(f"{count} {what}" for what, count in of.items())
        for feature, of in found.items()
        if of
    }
    assert told == odd
    assert found.keys() == {*TRANSFORMS.schema.sparse, *TRANSFORMS.schema.dense} - {
        "x:missing",
        "rate:missing",
    }


def test_what_a_value_became() -> None:
    row = PLAIN | {"words": ["b", "no"], "hashed": "a", "weighted": ["a", "b"], "w": [0.5, 2.0]}
    found, batch = (
        {one["feature"]: one for one in describe_features(TRANSFORMS, FAST, row)},
        FAST.batch([row]),
    )
    assert found["words"]["became"] == ["3", "1"]
    assert found["weighted"]["weights"] == [0.5, 2.0] and "weights" not in found["words"]
    assert int(found["hashed"]["became"][0]) == int(batch.ids["hashed"].values_N[0]) > 2**53
    for name in ("plain", "x", "log", "log2"):
        assert found[name]["became"] == float(
            batch.dense_BC[0, TRANSFORMS.schema.dense.index(name)]
        )
    assert found["x"]["range"] == (-50.0, 60.0)
    assert found["number"]["column"] == "n" and found["log2"]["column"] == "x"


def test_a_list_is_missing_with_its_weights() -> None:
    found = missing_together(TRANSFORMS.schema)
    assert {"weighted", "w"} in found and {"x"} in found and {"colons"} in found
    assert sorted(name for names in found for name in names) == sorted(FAST.sources)
