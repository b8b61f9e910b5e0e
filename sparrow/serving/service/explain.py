"""What a model makes of one candidate, and how its score changes when a column is set to missing.

Each column is set to missing alone (prediction difference analysis: Robnik-Sikonja and Kononenko, "Explaining
Classifications For Individual Instances", IEEE TKDE 20, 2008; they average over values where a model knows none that is
missing). That tells what the model does. It is not the cause of what a person does.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from sparrow.core.errors import UserError
from sparrow.features.encodings import MISSING, UNKNOWN
from sparrow.features.schema import Column, Encoding, Schema, missing_of
from sparrow.features.transforms import Transforms
from sparrow.serving.requests import Encoder
from sparrow.serving.service.asked import Asked
from sparrow.serving.service.batcher import Answer
from sparrow.serving.service.limits import Limits, RefusedError

_SHOWN = 8  # numbers of a vector


def without_each(asked: Asked, candidate: int, schema: Schema, limits: Limits) -> tuple[Asked, list[set[str]]]:
    """Returns a request of F + 1 candidates: one as it is, then F times with some columns missing.

    Also returns which columns these are: one, or a list and its weights.

    Args:
        asked: a request.
        candidate: which of its candidates.
        schema: of the model.
        limits: of the service.

    Raises:
        UserError: when the request has no such candidate.
        RefusedError: when the made request would be larger than requests may be.
    """
    if candidate >= asked.count:
        raise UserError(f"candidate {candidate}: the request has {asked.count}; the first one is 0")
    row = {**asked.user, **{name: values[candidate] for name, values in asked.candidates.items()}}
    columns = _together(schema)
    count = len(columns) + 1
    size = count * len(msgspec.json.encode(row))
    if count > limits.candidates or size > limits.body_mb * 1e6:
        told = f"it is scored {count} times, {size} bytes in all; shorten its lists, or serve with larger limits"
        raise RefusedError(413, f"candidate {candidate}: {told}")
    made = {name: [value] * count for name, value in row.items()}
    for number, names in enumerate(columns, 1):
        for name in names:
            made[name][number] = None
    return replace(asked, user={}, candidates=made, count=count, is_trial=True), columns


def written(asked: Asked, candidate: int, columns: list[set[str]], answer: Answer) -> bytes:
    """Returns JSON: the candidate's scores by label, and its features.

    Of each feature: the column of the log and its value, what it became, what was odd about it, and "without", the
    scores with this column missing. An id that it became is text, because clients may round integers above 2^53.

    Args:
        asked, columns: what `without_each` returned.
        candidate: which one was asked about.
        answer: to it.
    """
    scorer, row = answer.version.scorer, {name: values[0] for name, values in asked.candidates.items()}
    scores = [dict(zip(scorer.labels, scores_T, strict=True)) for scores_T in answer.scores_NT.tolist()]
    features = understood(scorer.transforms, scorer.encoder, row)
    for one in features:
        one["without"] = next(of for of, names in zip(scores[1:], columns, strict=True) if one["column"] in names)
    told = {"version": answer.version.name, "candidate": candidate, "scores": scores[0], "features": features}
    return msgspec.json.encode(told)


def understood(transforms: Transforms, encoder: Encoder, row: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns what a model makes of a raw row, feature by feature.

    "odd" counts in a value what is missing, unknown to the vocabulary, clipped to training's range or cut from a list.

    Args:
        transforms: the model's.
        encoder: of these transforms.
        row: column -> value.

    Raises:
        UserError: see `Encoder.batch`.
    """
    schema, lens = transforms.schema, _lens(transforms.schema)
    hashed = replace(transforms, schema=lens, vocabularies={})
    ours, whole = encoder.batch([row]), Encoder(hashed, "reference").batch([row])
    found: list[dict[str, Any]] = []
    for name in (*schema.sparse, *schema.dense):
        column = schema.columns[name]
        if column.transform == "missing" or column.cross:  # they are made of others, which are told
            continue
        value = row[column.source or name]
        told = {"feature": name, "column": column.source or name, "kind": column.kind, "value": value}
        if column.kind == "numeric":
            number, unclipped, is_missing = (
                float(batch.dense_BC[0, of.places[at].start])
                for batch, of, at in ((ours, schema, name), (whole, lens, name), (whole, lens, missing_of(name)))
            )
            odd = {"missing": int(is_missing), "clipped": int(number != unclipped)}
            told |= {"became": number, "range": (column.low, column.high)}
        elif column.kind == "vector":
            numbers = ours.dense_BC[0, schema.places[name]].tolist()
            odd = {"missing": int(whole.dense_BC[0, lens.places[missing_of(name)].start])}
            rest = [f"{len(numbers) - _SHOWN} more"] if len(numbers) > _SHOWN else []
            told |= {"became": [*(f"{number:.4g}" for number in numbers[:_SHOWN]), *rest]}
        else:
            ids = ours.ids[name]
            numbers = ids.values_N.tolist()
            dropped = value.count(None) if isinstance(value, list) else 0
            odd = {"missing": dropped or numbers.count(MISSING) or int(not numbers)}
            odd |= {"unknown": numbers.count(UNKNOWN)}
            odd |= {"cut": len(whole.ids[name].values_N) - len(numbers) if column.kind == "list" else 0}
            told |= {"became": list(map(str, numbers))}
            if column.weights and ids.weights_N is not None:
                told["weights"] = ids.weights_N.tolist()
        found.append(told | {"odd": {what: count for what, count in odd.items() if count}})
    return found


def _together(schema: Schema) -> list[set[str]]:
    """Returns the columns of the log in sets that are missing together: a list without its weights is refused."""
    found: list[set[str]] = []
    for name in (*schema.sparse, *schema.dense):
        column = schema.columns[name]
        if column.transform != "missing" and not column.cross:
            names = {of for of in (column.source or name, column.weights) if of and of != ":"}
            found, others = [one for one in found if not one & names], [one for one in found if one & names]
            found.append(names.union(*others))
    return found


def _lens(schema: Schema) -> Schema:
    """Returns a schema that neither cuts lists nor clips numbers, and tells of each number whether it is missing."""
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
    return Schema(columns=columns, encodings={str(c.table): Encoding(kind="hash") for c in columns.values() if c.table})
