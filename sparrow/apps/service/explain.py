"""What a model makes of one candidate, and how its score changes when a column is set to missing.

Each column is set to missing alone (prediction difference analysis: Robnik-Sikonja and Kononenko,
"Explaining Classifications For Individual Instances", IEEE TKDE 20, 2008; they average over values
where a model knows none that is missing). That tells what the model does. It is not the cause of
what a person does.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from sparrow.apps.service.batcher import Answer
from sparrow.apps.service.limits import Limits, RefusedError
from sparrow.apps.service.request import Request
from sparrow.core import Batch
from sparrow.core.errors import UserError
from sparrow.features.encodings import MISSING, UNKNOWN
from sparrow.features.schema import Column, Encoding, Schema, Source, missing_of
from sparrow.features.transforms import Transforms
from sparrow.serving.requests import Encoder
from sparrow.serving.values import missing_together

_SHOWN = 8  # numbers of a vector


def drop_each_column(
    request: Request, candidate: int, schema: Schema, limits: Limits
) -> tuple[Request, list[set[str]]]:
    """Make a request of F + 1 candidates: one as it is, then F times with some columns missing.

    Also returns which columns these are: one, or a list and its weights.

    Args:
        request: a request.
        candidate: which of its candidates.
        schema: of the model.
        limits: of the service.

    Raises:
        UserError: when the request has no such candidate.
        RefusedError: when the made request would be larger than requests may be.
    """
    if candidate >= request.count:
        raise UserError(
            f"candidate {candidate}: the request has {request.count}; the first one is 0"
        )
    row = {
        **request.user,
        **{name: values[candidate] for name, values in request.candidates.items()},
    }
    columns = missing_together(schema)
    count = len(columns) + 1
    size = count * len(msgspec.json.encode(row))
    if count > limits.candidates or size > limits.body_mb * 1e6:
        reason = (
            f"it is scored {count} times, {size} bytes in all; shorten its lists, or serve with"
            " larger limits"
        )
        raise RefusedError(413, f"candidate {candidate}: {reason}")
    lists = {name: [value] * count for name, value in row.items()}
    for number, names in enumerate(columns, 1):
        for name in names:
            lists[name][number] = None
    return replace(request, user={}, candidates=lists, count=count, is_trial=True), columns


def format_explanation(
    request: Request, candidate: int, columns: list[set[str]], answer: Answer
) -> bytes:
    """Returns JSON: the candidate's scores by label, and its features.

    Of each feature: the column of the log and its value, what it became, what was odd about it, and
    "without", the scores with this column missing. An id that it became is text, because clients
    may round integers above 2^53.

    Args:
        request, columns: what `drop_each_column` returned.
        candidate: which one of the caller's request it is about.
        answer: to it.
    """
    scorer = answer.version.scorer
    row = {name: values[0] for name, values in request.candidates.items()}
    scores = [
        dict(zip(scorer.labels, scores_T, strict=True)) for scores_T in answer.scores_NT.tolist()
    ]
    features = describe_features(scorer.transforms, scorer.encoder, row)
    without: dict[str, dict[str, float]] = {}
    for names, scores_without in zip(columns, scores[1:], strict=True):
        without |= dict.fromkeys(names, scores_without)
    for feature in features:
        feature["without"] = without[feature["column"]]
    explanation = {
        "version": answer.version.name,
        "candidate": candidate,
        "scores": scores[0],
        "features": features,
    }
    return msgspec.json.encode(explanation)


def describe_features(
    transforms: Transforms, encoder: Encoder, row: dict[str, Any]
) -> list[dict[str, Any]]:
    """Describe what a model makes of a raw row, feature by feature.

    "odd" counts in a value what is missing, unknown to the vocabulary, clipped to training's range
    or cut from a list.

    Args:
        transforms: the model's.
        encoder: of these transforms.
        row: column -> value.

    Raises:
        UserError: see `Encoder.batch`.
    """
    schema = transforms.schema
    lens = _lens(transforms.schema)
    hashed = replace(transforms, schema=lens, vocabularies={})
    encoded = encoder.batch([row])
    uncut = Encoder(hashed, "reference").batch([row])  # and unclipped
    features: list[dict[str, Any]] = []
    for name in (*schema.sparse, *schema.dense):
        column = schema.columns[name]
        # they are made of other features, which are described
        if column.transform == "missing" or column.cross:
            continue
        value = row[column.source or name]
        feature = {
            "feature": name,
            "column": column.source or name,
            "kind": column.kind,
            "value": value,
        }
        if column.kind == "numeric":
            number = _number(encoded, schema, name)
            unclipped = _number(uncut, lens, name)
            is_missing = _number(uncut, lens, missing_of(name))
            odd = {"missing": int(is_missing), "clipped": int(number != unclipped)}
            feature |= {"became": number, "range": (column.low, column.high)}
        elif column.kind == "vector":
            numbers = encoded.dense_BC[0, schema.places[name]].tolist()
            odd = {"missing": int(_number(uncut, lens, missing_of(name)))}
            rest = [f"{len(numbers) - _SHOWN} more"] if len(numbers) > _SHOWN else []
            feature |= {"became": [*(f"{number:.4g}" for number in numbers[:_SHOWN]), *rest]}
        else:
            ids = encoded.ids[name]
            numbers = ids.values_N.tolist()
            dropped = value.count(None) if isinstance(value, list) else 0
            odd = {"missing": dropped or numbers.count(MISSING) or int(not numbers)}
            odd |= {"unknown": numbers.count(UNKNOWN)}
            odd |= {
                "cut": len(uncut.ids[name].values_N) - len(numbers) if column.kind == "list" else 0
            }
            feature |= {"became": list(map(str, numbers))}
            if column.weights and ids.weights_N is not None:
                feature["weights"] = ids.weights_N.tolist()
        features.append(
            feature | {"odd": {oddity: count for oddity, count in odd.items() if count}}
        )
    return features


def _number(batch: Batch, schema: Schema, name: str) -> float:
    """Returns a number of the only row of a batch."""
    return float(batch.dense_BC[0, schema.places[name].start])


def _lens(schema: Schema) -> Schema:
    """Returns a schema that neither cuts lists nor clips numbers, and tells of each number whether
    it is missing.
    """
    columns: dict[str, Column] = {}
    for name, column in schema.columns.items():
        if column.kind == "numeric" and column.transform != "missing":
            columns[name] = replace(column, low=None, high=None)
            columns[missing_of(name)] = Column(kind="numeric", transform="missing")
        elif column.kind == "vector":
            columns[name] = column
            columns[missing_of(name)] = Column(kind="numeric", transform="missing")
        elif column.kind == "list":
            columns[name] = replace(column, max_length=None)
    encodings = {str(c.table): Encoding(kind="hash") for c in columns.values() if c.table}
    return Schema(columns=columns, encodings=encodings, source=Source(cells=schema.source.cells))
