"""What the service takes and answers, as OpenAPI 3.1 (https://spec.openapis.org/oas/v3.1.0), for
the current model.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from sparrow.apps.service.limits import Limits
from sparrow.apps.service.protocols import v2
from sparrow.serving.scorer import Scorer

_WHY = {
    400: "The request does not fit",
    401: "No token, or another one",
    404: "No such model, version or route",
    405: "The route answers another method; see Allow",
    408: "The body came too slowly",
    413: "The request is too large",
    415: "The body is packed",
    429: "Too many requests wait; see Retry-After",
    431: "The headers are too large",
    500: "The service failed",
    503: "The deadline passed, or too many connections are open; see Retry-After",
}
_CLOSED = {"additionalProperties": False}
_ONE: list[Any] = ["null", "boolean", "number", "string"]


def describe(scorer: Scorer, name: str, limits: Limits) -> dict[str, Any]:
    """Returns the description.

    Args:
        scorer: of the model.
        name: of the model, in the Open Inference Protocol.
        limits: of the service.
    """
    model = f"/v2/models/{name}"
    gets = [
        "/health/live",
        "/health/ready",
        "/v2",
        "/v2/health/live",
        "/v2/health/ready",
        model,
        model + "/ready",
    ]
    columns = {
        column: _column(kind, scorer.encoder.sizes.get(column), limits)
        for column, kind in scorer.encoder.kinds.items()
    }
    rank = _object(_rank(columns, limits), ["candidates"]) | _CLOSED
    infer = _infer(scorer, name, columns)
    numbers = {"type": "array", "items": {"type": "number"}}
    label = {"type": "object", "properties": dict.fromkeys(scorer.labels, numbers)}
    paths: dict[str, Any] = {
        path: {"get": {"responses": _answers({"type": "object"})}} for path in gets
    }
    paths["/rank"] = _post(rank, _object({"scores": label}, ["version", "scores"]))
    paths[model + "/infer"] = _post(
        _object(infer, ["inputs"]), _object({}, ["model_name", "model_version", "outputs"])
    )
    features = {"type": "array", "items": {"type": "object"}}
    explained = {
        "candidate": {"type": "integer"},
        "scores": {"type": "object"},
        "features": features,
    }
    paths["/explain/{candidate}"] = _post(rank, _object(explained, list(explained)))
    paths["/explain/{candidate}"]["parameters"] = _place("candidate")
    example = _object(
        {"user": {"type": "object"}, "candidates": {"type": "array"}}, ["user", "candidates"]
    )
    paths["/example/{row}"] = {"parameters": _place("row"), "get": {"responses": _answers(example)}}
    paths["/"] = {"get": {"responses": _answers({"type": "string"}, "text/html")}}
    binary = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    paths[model + "/infer"]["post"]["responses"]["200"]["content"] |= binary
    info = {"title": f"Sparrow: {scorer.name}", "version": version("sparrow-rec")}
    return {"openapi": "3.1.0", "info": info, "paths": paths}


def _rank(columns: dict[str, Any], limits: Limits) -> dict[str, Any]:
    """Returns the schemas of what a request for a ranking has. columns: name -> schema of a
    value.
    """
    rows = {"type": "object", "properties": columns, "required": list(columns), **_CLOSED}
    lists = {column: {"type": "array", "items": schema} for column, schema in columns.items()}
    return {
        "user": {"type": "object", "properties": columns, **_CLOSED},
        "candidates": {
            "anyOf": [
                {"type": "array", "items": rows, "maxItems": limits.candidates},
                {"type": "object", "properties": lists, **_CLOSED},
            ]
        },
        "top": {"type": ["integer", "null"], "minimum": 1},
        "deadline_ms": {"type": ["number", "null"], "exclusiveMinimum": 0},
    }


def _infer(scorer: Scorer, name: str, columns: dict[str, Any]) -> dict[str, Any]:
    """Returns the schemas of what a request of the Open Inference Protocol has."""
    inputs = v2.metadata(scorer, name, "")["inputs"]
    tensor = {
        "name": {
            "enum": [entry["name"] for entry in inputs] + [column + v2.NULL for column in columns]
        },
        "datatype": {"enum": sorted({"BYTES", *v2.NUMBERS})},
        "shape": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0},
            "minItems": 1,
            "maxItems": 2,
        },
        "data": {"type": "array", "items": {"type": _ONE}},
    }
    return {
        "inputs": {"type": "array", "items": _object(tensor, list(tensor))},
        "id": {"type": "string"},
    }


def _column(kind: str, size: int | None, limits: Limits) -> dict[str, Any]:
    """Returns the schema of a value. Numbers may be written as text, and ids as numbers, as in the
    log.

    size: of a vector.
    """
    if kind == "vector":
        return {
            "type": ["null", "array"],
            "items": {"type": "number"},
            "minItems": size,
            "maxItems": size,
        }
    if kind == "list":
        return {
            "type": ["null", "array"],
            "items": {"type": ["integer", "string"]},
            "maxItems": limits.list_values,
        }
    return {
        "type": [
            "null",
            *{"number": ["number"], "integer": ["integer"]}.get(kind, ["integer", "string"]),
        ]
    }


def _object(properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required}


def _post(body: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    return {
        "post": {
            "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
            "responses": _answers(answer),
        }
    }


def _place(name: str) -> list[dict[str, Any]]:
    """Returns the part of a path that says which one, from 0 on."""
    return [
        {"name": name, "in": "path", "required": True, "schema": {"type": "integer", "minimum": 0}}
    ]


def _answers(schema: dict[str, Any], content_type: str = "application/json") -> dict[str, Any]:
    """Returns the answers of a route: a schema of one type of content, or an error."""
    error = {"application/json": {"schema": _object({"error": {"type": "string"}}, ["error"])}}
    responses: dict[str, Any] = {
        "200": {"description": "OK", "content": {content_type: {"schema": schema}}}
    }
    return responses | {
        str(status): {"description": why, "content": error} for status, why in _WHY.items()
    }
