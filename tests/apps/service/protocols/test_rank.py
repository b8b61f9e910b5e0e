from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparrow.apps.service.app import Service
from sparrow.apps.service.limits import Limits
from sparrow.serving import Scorer
from tests.apps.service.asking import ask
from tests.apps.service.test_batcher import CLOSE, OF_USER, assert_scored, request


def test_rows_columns_and_the_best(
    service: Service, scorer: Scorer, rows: list[dict[str, Any]]
) -> None:
    one = request(rows, list(range(10)))
    turned = {name: [row[name] for row in one["candidates"]] for name in one["candidates"][0]}
    whole = {"candidates": [rows[i] for i in range(10)]}
    for asked in (one, one | {"candidates": turned}, one | {"deadline_ms": 50_000.5}):
        assert_scored(ask(service, "/rank", asked), scorer, one)
    found = ask(service, "/rank", whole).json
    want = scorer.score(rows[:10])[:, 0]
    assert np.abs(np.array(found["scores"]["label"]) - want).max() <= CLOSE
    best = ask(service, "/rank", whole | {"top": 3}).json
    assert (
        best["candidates"] == np.argsort(-want)[:3].tolist() and len(best["scores"]["label"]) == 3
    )
    assert np.abs(np.array(best["scores"]["label"]) - np.sort(want)[::-1][:3]).max() <= CLOSE
    assert len(ask(service, "/rank", whole | {"top": 30}).json["candidates"]) == 10


def test_a_request_without_candidates_has_no_scores(
    service: Service, rows: list[dict[str, Any]]
) -> None:
    user = {name: rows[0][name] for name in OF_USER}
    empty: dict[str, Any] = {name: [] for name in rows[0] if name not in user}
    for of, candidates in (
        ({}, {name: [] for name in rows[0]}),
        (user, empty),
        (user, []),
        ({}, []),
    ):
        got = ask(service, "/rank", {"user": of, "candidates": candidates, "top": 3})
        assert (
            got.status == 200
            and got.json["scores"] == {"label": []}
            and got.json["candidates"] == []
        )
    got = ask(service, "/rank", {"user": {"agent": "x"}, "candidates": []})
    assert got.status == 400 and "column 'agent': the model does not read it" in got.json["error"]
    got = ask(service, "/explain/0", {"user": user, "candidates": []})
    assert got.status == 400 and "candidate 0: the request has 0" in got.json["error"]


def test_other_columns_are_refused_or_named(
    serve: Any, scorer: Scorer, rows: list[dict[str, Any]]
) -> None:
    one = request(rows, [0, 1])
    more = {
        "user": one["user"] | {"agent": "x"},
        "candidates": [row | {"rank": 1} for row in one["candidates"]],
    }
    got = ask(serve(), "/rank", more)
    assert (
        got.status == 400
        and "column 'agent', 'rank': the model does not read it" in got.json["error"]
    )
    got = ask(serve(Limits(deadline_ms=60_000, extra="ignore")), "/rank", more)
    assert got.json["ignored"] == ["agent", "rank"]
    assert_scored(got, scorer, one)


DEEP = b'{"candidates": ' + b"[" * 100_000
MISTAKES = {
    "no JSON": (b"\xff{", "body: "),
    "half of it": (b'{"candidates": [', "body: ends too early; send "),
    "no UTF-8": (b'{"candidates": {"\xe4": [1]}}', "body: is not UTF-8; send "),
    "nothing": (b"", "body: is empty; send "),
    "deep": (DEEP, "body: "),
    "deep and closed": (DEEP + b"]" * 100_000 + b"}", "body: "),
    "NaN": (b'{"candidates": [{"item": NaN}]}', "body: "),
    "a list": (b"[]", "body: "),
    "an unknown field": (b'{"candidates": {}, "usr": {}}', "usr"),
    "no candidates": (b'{"user": {}}', "candidates"),
    "a list of lists": (b'{"candidates": {"item": [[[1]]]}}', "$.candidates"),
    "an object as value": (b'{"candidates": {"item": [{}]}}', "$.candidates"),
    "top": (b'{"candidates": {}, "top": 0}', "top: 0; give 1 or more"),
    "half a surrogate": (b'{"candidates": {"item": ["\\ud800"]}}', "body: "),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_bodies_that_are_no_request(name: str, service: Service) -> None:
    body, says = MISTAKES[name]
    got = ask(service, "/rank", body)
    assert got.status == 400 and says in got.json["error"] and "\n" not in got.json["error"]


def test_requests_that_do_not_fit_the_model(service: Service, rows: list[dict[str, Any]]) -> None:
    one = request(rows, [0, 1])
    lists = {name: [row[name] for row in one["candidates"]] for name in one["candidates"][0]}
    without = [
        {name: value for name, value in row.items() if name != "item"} for row in one["candidates"]
    ]
    for change, says in (
        ({"candidates": without}, "no column 'item'; give null where there is no value"),
        (
            {"candidates": [row | {"itm": 1} for row in without]},
            (
                "no column 'item'; give null where there is no value; 'itm' is no column of the"
                " model: is it meant?"
            ),
        ),
        (
            {"candidates": [*one["candidates"], without[0]]},
            "candidates[2]: 'item' is in one row and not in another",
        ),
        ({"candidates": lists | {"item": [1]}}, "values where"),
        (
            {"user": one["user"] | {"item": 1}},
            "user.item: is a column of the candidates too; give it once",
        ),
        ({"deadline_ms": -1}, "deadline: -1 ms; give a number above 0"),
        ({"user": one["user"] | {"num_1": "much"}}, "column 'num_1', row 0: 'much' is no number"),
    ):
        got = ask(service, "/rank", one | change)
        assert got.status == 400 and says in got.json["error"], got.json


values = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5)
)
values |= st.lists(values, max_size=3)
anything = st.recursive(
    values,
    lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)


@settings(max_examples=60, suppress_health_check=list(HealthCheck), deadline=None)
@given(data=st.data())
def test_any_values_are_scored_or_a_mistake_of_the_user(
    data: st.DataObject, service: Service, rows: list[dict[str, Any]]
) -> None:
    one: dict[str, Any] = json.loads(json.dumps(request(rows, [0, 1])))
    for _ in range(data.draw(st.integers(1, 3))):
        into = data.draw(
            st.sampled_from([one["user"], one["candidates"][0], one["candidates"][1], one])
        )
        into[data.draw(st.sampled_from(sorted(into)))] = data.draw(anything)
        if not (
            isinstance(one.get("user"), dict)
            and isinstance(one.get("candidates"), list)
            and len(one) == 2
        ):
            break
        parts = [one["user"], *one["candidates"]]
        if len(parts) != 3 or not all(isinstance(part, dict) and part for part in parts):
            break
    got = ask(service, "/rank", one)
    assert got.status in (200, 400), got.body
