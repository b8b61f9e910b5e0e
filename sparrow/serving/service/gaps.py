"""What was missing or unknown in a request, by column of the log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sparrow.features.encodings import UNKNOWN
from sparrow.features.schema import Schema
from sparrow.serving.scorer import Crossed
from sparrow.serving.service.asked import Asked

_EMPTY = 2  # beside MISSING and UNKNOWN, which are 0 and 1


class Gaps(NamedTuple):
    """Column -> how many of a request's values were missing, and how many were ids that the model does not know.

    The keys of candidates that a catalogue does not have are unknown too.
    """

    missing: dict[str, int]
    unknown: dict[str, int]


def gaps(schema: Schema, crossed: Crossed, asked: Sequence[Asked]) -> list[Gaps]:
    """Returns the gaps of each request in a batch. A list is missing when it is empty. A user's value counts once.

    Args:
        schema: of the model.
        crossed: the batch.
        asked: its requests, none of them without candidates.
    """
    found = [Gaps({}, {}) for _ in asked]
    if schema.sparse:
        _ids(schema, crossed, found)
    if schema.dense:
        _numbers(schema, crossed, asked, found)
    if crossed.known is not None:
        key, ends = crossed.known.key, np.cumsum(crossed.counts)[:-1]
        for gap, unknown_B in zip(found, np.split(crossed.known.unknown_B, ends), strict=True):
            if unknown_B.any():
                gap.unknown[key] = max(gap.unknown.get(key, 0), int(unknown_B.sum()))
    return found


def _ids(schema: Schema, crossed: Crossed, found: list[Gaps]) -> None:
    """Count missing and unknown ids, and empty lists."""
    ids, names = crossed.batch.ids, schema.sparse
    assert ids.offsets is not None and ids.lengths is not None and ids.rows is not None
    values_N = ids.values_N.numpy()
    odd_N = np.flatnonzero(values_N >> 1 == 0)  # MISSING and UNKNOWN
    empty_N = np.flatnonzero(ids.lengths.numpy() == 0)
    row_N = np.concatenate((np.searchsorted(ids.offsets.numpy(), odd_N, "right") - 1, empty_N))
    what_N = np.concatenate((values_N[odd_N], np.full(len(empty_N), _EMPTY)))
    first_F = np.cumsum((0, *ids.rows))
    feature_N = np.searchsorted(first_F, row_N, "right") - 1
    row_N -= first_F[feature_N]
    users = {name for group in ids.inverse_B for name in group}
    is_user_N = np.array([name in users for name in names])[feature_N]
    owner_B = np.repeat(np.arange(len(found)), crossed.counts)
    request_N = np.where(is_user_N, row_N, owner_B[np.minimum(row_N, len(owner_B) - 1)])
    keys, counts = np.unique((request_N * len(names) + feature_N) * 3 + what_N, return_counts=True)
    for key, count in zip(keys.tolist(), counts.tolist(), strict=True):
        request, feature, what = key // 3 // len(names), key // 3 % len(names), key % 3
        column = schema.columns[names[feature]]
        if what == UNKNOWN and schema.encodings[str(column.table)].is_numbered:
            into = found[request].unknown
        elif what != UNKNOWN and (what == _EMPTY) == (column.kind == "list"):
            into = found[request].missing
        else:
            continue
        source = column.source or names[feature]
        into[source] = max(into.get(source, 0), count)  # two features may read one column


def _numbers(schema: Schema, crossed: Crossed, asked: Sequence[Asked], found: list[Gaps]) -> None:
    """Count missing numbers: those that the model is told of, else the nulls."""
    places, starts_R = schema.places, np.cumsum((0, *crossed.counts[:-1]))
    told_RC = np.add.reduceat(crossed.batch.dense_BC.numpy() > 0, starts_R, dtype=np.int64)
    for name in places:
        source, told = schema.columns[name].source or name, schema.mark_of(name)
        part = crossed.known.parts.get(name) if crossed.known is not None else None
        missing_B = None if part is None or part.numbers is None else np.isnan(part.numbers[: sum(crossed.counts)])
        for r, one in enumerate(asked if schema.columns[name].transform != "missing" else ()):
            is_user = source in one.user
            if told is not None:
                count = int(told_RC[r, places[told].start])
            elif missing_B is not None:
                count = int(missing_B[starts_R[r] : starts_R[r] + crossed.counts[r]].sum())
            else:
                count = int(one.user[source] is None) if is_user else one.candidates[source].count(None)
            if count:
                found[r].missing[source] = 1 if is_user else count


def values(schema: Schema, crossed: Crossed) -> dict[tuple[str, str], int]:
    """Returns ("missing" or "unknown", column) -> how many values of a batch could be so. See `gaps`.

    Of a list each id may be unknown.
    """
    ids, found = crossed.batch.ids, Counter[tuple[str, str]]()
    for f, name in enumerate(schema.sparse):
        column, rows = schema.columns[name], ids.rows[f] if ids.rows else 0
        at = column.source or name
        found["missing", at] = max(found["missing", at], rows)
        if schema.encodings[str(column.table)].is_numbered:
            found["unknown", at] = max(found["unknown", at], ids.bounds[f + 1] - ids.bounds[f])
    for name in schema.dense:
        if schema.columns[name].transform != "missing":
            at = schema.columns[name].source or name
            found["missing", at] = len(crossed.counts) if at in crossed.columns else sum(crossed.counts)
    return found
