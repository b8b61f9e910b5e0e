"""What was missing or unknown in a request, by column of the log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sparrow.apps.service.request import Request
from sparrow.features.encodings import UNKNOWN
from sparrow.features.schema import Schema
from sparrow.features.times import far_times
from sparrow.serving.scorer import Crossed
from sparrow.serving.values import seconds_of_values

_EMPTY = 2  # beside MISSING and UNKNOWN, which are 0 and 1


class OddValues(NamedTuple):
    """Column -> how many of a request's values were missing, were ids that the model does not know,
    or were far times.

    The keys of candidates that a catalogue does not have are unknown too. Times are far that are
    probably wrong, see `sparrow.features.times.far_times`.
    """

    missing: dict[str, int]
    unknown: dict[str, int]
    far: dict[str, int]


def count_odd_values(
    schema: Schema, crossed: Crossed, requests: Sequence[Request]
) -> list[OddValues]:
    """Count the odd values of each request in a batch. A list is missing when it is empty. A user's
    value counts once.

    Args:
        schema: of the model.
        crossed: the batch.
        requests: its requests, none of them without candidates.
    """
    odd_values = [OddValues({}, {}, {}) for _ in requests]
    if schema.sparse:
        _count_ids(schema, crossed, odd_values)
    if schema.dense:
        _count_numbers(schema, crossed, requests, odd_values)
    for source, limits in _times(schema).items():
        _count_far(schema, source, limits, requests, odd_values)
    if crossed.known is not None:
        key = crossed.known.key
        ends = np.cumsum(crossed.counts)[:-1]
        for odd, unknown_B in zip(odd_values, np.split(crossed.known.unknown_B, ends), strict=True):
            if unknown_B.any():
                odd.unknown[key] = max(odd.unknown.get(key, 0), int(unknown_B.sum()))
    return odd_values


def _count_ids(schema: Schema, crossed: Crossed, odd_values: list[OddValues]) -> None:
    """Count missing and unknown ids, and empty lists."""
    ids = crossed.batch.ids
    names = schema.sparse
    assert ids.offsets is not None and ids.lengths is not None and ids.rows is not None
    values_N = ids.values_N.numpy()
    odd_N = np.flatnonzero(values_N >> 1 == 0)  # MISSING and UNKNOWN
    empty_N = np.flatnonzero(ids.lengths.numpy() == 0)
    row_N = np.concatenate((np.searchsorted(ids.offsets.numpy(), odd_N, "right") - 1, empty_N))
    oddity_N = np.concatenate((values_N[odd_N], np.full(len(empty_N), _EMPTY)))
    first_F = np.cumsum((0, *ids.rows))
    feature_N = np.searchsorted(first_F, row_N, "right") - 1
    row_N -= first_F[feature_N]
    users = {name for group in ids.inverse_B for name in group}
    is_user_N = np.array([name in users for name in names])[feature_N]
    owner_B = np.repeat(np.arange(len(odd_values)), crossed.counts)
    request_N = np.where(is_user_N, row_N, owner_B[np.minimum(row_N, len(owner_B) - 1)])
    keys, counts = np.unique(
        (request_N * len(names) + feature_N) * 3 + oddity_N, return_counts=True
    )
    for key, count in zip(keys.tolist(), counts.tolist(), strict=True):
        request = key // 3 // len(names)
        feature = key // 3 % len(names)
        oddity = key % 3
        column = schema.columns[names[feature]]
        if oddity == UNKNOWN and schema.encodings[str(column.table)].is_numbered:
            into = odd_values[request].unknown
        elif oddity != UNKNOWN and (oddity == _EMPTY) == (column.kind == "list"):
            into = odd_values[request].missing
        else:
            continue
        source = column.source or names[feature]
        into[source] = max(into.get(source, 0), count)  # two features may read one column


def _count_numbers(
    schema: Schema, crossed: Crossed, requests: Sequence[Request], odd_values: list[OddValues]
) -> None:
    """Count missing numbers: those that the model has a mark of, else the nulls."""
    places = schema.places
    starts_R = np.cumsum((0, *crossed.counts[:-1]))
    mark_RC = np.add.reduceat(crossed.batch.dense_BC.numpy() > 0, starts_R, dtype=np.int64)
    for name in places:
        source = schema.columns[name].source or name
        mark = schema.mark_of(name)
        part = crossed.known.parts.get(name) if crossed.known is not None else None
        missing_B = (
            None
            if part is None or part.numbers is None
            else np.isnan(part.numbers[: sum(crossed.counts)])
        )
        for r, request in enumerate(
            requests if schema.columns[name].transform != "missing" else ()
        ):
            is_user = source in request.user
            if mark is not None:
                count = int(mark_RC[r, places[mark].start])
            elif missing_B is not None:
                count = int(missing_B[starts_R[r] : starts_R[r] + crossed.counts[r]].sum())
            else:
                count = (
                    int(request.user[source] is None)
                    if is_user
                    else request.candidates[source].count(None)
                )
            if count:
                odd_values[r].missing[source] = 1 if is_user else count


def _times(schema: Schema) -> dict[str, tuple[float, float]]:
    """Returns the columns of a request with times that features are parts of, and the first and
    last of training.
    """
    limits = {
        column.source or name: schema.times_of(column.source or name)
        for name, column in schema.columns.items()
        if column.part
    }
    return {source: ends for source, ends in limits.items() if ends is not None}


def _count_far(
    schema: Schema,
    source: str,
    limits: tuple[float, float],
    requests: Sequence[Request],
    odd_values: list[OddValues],
) -> None:
    """Count the times of a column that are far from training's."""
    format = schema.columns[schema.parts_of(source)[0]].format
    with_words = schema.source.has_words
    for request, odd in zip(requests, odd_values, strict=True):
        times = (
            [request.user[source]] if source in request.user else request.candidates.get(source, ())
        )
        count = int(
            far_times(
                seconds_of_values(times, source, format, with_words=with_words), *limits
            ).sum()
        )
        if count:
            odd.far[source] = count


def count_read_values(schema: Schema, crossed: Crossed) -> dict[tuple[str, str], int]:
    """Returns ("missing", "unknown" or "far", column) -> how many values of a batch could be so.
    See `OddValues`.

    Of a list each id may be unknown.
    """
    ids = crossed.batch.ids
    counts = Counter[tuple[str, str]]()
    for f, name in enumerate(schema.sparse):
        column = schema.columns[name]
        rows = ids.rows[f] if ids.rows else 0
        at = column.source or name
        counts["missing", at] = max(counts["missing", at], rows)
        if schema.encodings[str(column.table)].is_numbered:
            counts["unknown", at] = max(counts["unknown", at], ids.bounds[f + 1] - ids.bounds[f])
    for name in schema.dense:
        if schema.columns[name].transform != "missing":
            at = schema.columns[name].source or name
            counts["missing", at] = (
                len(crossed.counts) if at in crossed.columns else sum(crossed.counts)
            )
    for source in _times(schema):
        counts["far", source] = counts["missing", source]
    return counts
