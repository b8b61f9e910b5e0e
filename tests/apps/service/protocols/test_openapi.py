from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from sparrow.apps.service.app import Service, app
from sparrow.apps.service.protocols import v2
from sparrow.serving import Scorer
from tests.apps.service.asking import ask
from tests.apps.service.protocols.test_v2 import INFER, as_json, tensors
from tests.apps.service.test_batcher import request


def described(service: Service) -> Any:
    return ask(service, "/openapi.json").json


def test_it_has_the_columns_of_the_model(service: Service, scorer: Scorer) -> None:
    told = described(service)
    assert told["openapi"] == "3.1.0" and INFER in told["paths"]
    body = told["paths"]["/rank"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    rows, lists = body["properties"]["candidates"]["anyOf"]
    assert (
        rows["items"]["properties"].keys()
        == lists["properties"].keys()
        == set(scorer.encoder.kinds)
    )
    assert rows["items"]["properties"]["num_0"] == {"type": ["null", "number"]}
    infer = told["paths"][INFER]["post"]["requestBody"]["content"]["application/json"]["schema"]
    names = set(infer["properties"]["inputs"]["items"]["properties"]["name"]["enum"])
    assert names == {name + end for name in scorer.encoder.kinds for end in ("", v2.NULL)} | {
        name + v2.LENGTHS for name, kind in scorer.encoder.kinds.items() if kind == "list"
    }


def test_it_allows_what_is_answered(
    service: Service, scorer: Scorer, rows: list[dict[str, Any]]
) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    paths = described(service)["paths"]
    some = [row | {"num_0": 0.5, "num_1": 0.5, "num_2": 0.5} for row in rows[:3]]
    in_rows = request(rows, [0, 1])
    in_columns = in_rows | {
        "candidates": {
            n: [row[n] for row in in_rows["candidates"]] for n in in_rows["candidates"][0]
        }
    }
    full = {"candidates": some, "top": 2, "deadline_ms": 60_000}
    for path, body, status in (
        ("/rank", in_rows | {"user": {}, "candidates": some}, 200),
        ("/rank", full, 200),
        ("/rank", in_columns, 200),
        ("/rank", {"candidates": []}, 200),
        ("/explain/{candidate}", full, 200),
        ("/explain/{candidate}", {"candidates": []} | full | {"top": 0}, 400),
        ("/rank", full | {"top": 0}, 400),
        ("/rank", {}, 400),
        (INFER, as_json(tensors(scorer, some)), 200),
        (INFER, {"inputs": [{"name": "x"}]}, 400),
    ):
        told, got = paths[path]["post"], ask(service, path.replace("{candidate}", "1"), body)
        assert got.status == status, got.json
        check = jsonschema.Draft202012Validator(
            told["requestBody"]["content"]["application/json"]["schema"]
        )
        assert check.is_valid(body) == (status == 200), body
        jsonschema.validate(
            got.json, told["responses"][str(status)]["content"]["application/json"]["schema"]
        )
    example = ask(service, "/example/1").json
    told = paths["/example/{row}"]["get"]["responses"]["200"]["content"]["application/json"][
        "schema"
    ]
    jsonschema.validate(example, told)
    assert ask(service, "/rank", example).status == 200
    assert "text/html" in paths["/"]["get"]["responses"]["200"]["content"]


@pytest.mark.slow
def test_schemathesis_finds_nothing(service: Service) -> None:
    """What it makes from the description, right and wrong, is answered as it is described, and
    never by 500.
    """
    schemathesis = pytest.importorskip("schemathesis")
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import negative_data_rejection, positive_data_acceptance

    # A description cannot say that lists have one length. Values of other kinds are read where the
    # log has them so. And 503 is the right answer to a deadline of 1e-9 ms.
    left_out = [positive_data_acceptance, negative_data_rejection, not_a_server_error]
    schema, seen = schemathesis.openapi.from_asgi("/openapi.json", app(service)), []
    right, wrong = schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE
    for found in schema.get_all_operations():
        operation = found.ok()

        @given(
            case=operation.as_strategy(generation_mode=right)
            | operation.as_strategy(generation_mode=wrong)
        )
        @settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
        def ask_it(case: Any) -> None:
            answer = case.call()
            case.validate_response(answer, excluded_checks=left_out)
            assert answer.status_code != 500
            seen.append((case.path, answer.status_code))

        ask_it()
    assert {200, 400} <= {status for path, status in seen if path == "/rank"}
