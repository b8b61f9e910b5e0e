"""What was missing or unknown in a request, by column of the log."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sparrow.core.arrays import Int64s
from sparrow.features.encodings import MISSING, UNKNOWN
from sparrow.features.schema import Schema, missing_of
from sparrow.serving.scorer import Crossed
from sparrow.serving.service.asked import Asked


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
    ids, names, ends = crossed.batch.ids, schema.sparse, np.cumsum(crossed.counts)[:-1]
    found = [Gaps({}, {}) for _ in asked]
    if names:
        assert ids.offsets is not None and ids.lengths is not None and ids.rows is not None
        of_users = np.isin(names, [name for group in ids.inverse_B for name in group])
        is_list = np.array([schema.columns[name].kind == "list" for name in names])
        is_numbered = np.array([schema.encodings[str(schema.columns[name].table)].is_numbered for name in names])
        first_F = np.cumsum((0, *ids.rows))
        owner_B = np.repeat(np.arange(len(asked)), crossed.counts)

        def add(row_N: Int64s, unknown: bool) -> None:
            feature_N = np.searchsorted(first_F, row_N, "right") - 1
            keep_N = is_numbered[feature_N] if unknown else np.ones(len(row_N), bool)
            row_N, feature_N = row_N[keep_N] - first_F[feature_N[keep_N]], feature_N[keep_N]
            request_N = np.where(of_users[feature_N], row_N, owner_B[np.minimum(row_N, len(owner_B) - 1)])
            counts = np.bincount(request_N * len(names) + feature_N, minlength=0)
            for at in np.flatnonzero(counts).tolist():
                request, feature = divmod(at, len(names))
                name = schema.columns[names[feature]].source or names[feature]
                into = found[request].unknown if unknown else found[request].missing
                into[name] = max(into.get(name, 0), int(counts[at]))  # two features may read one column

        values_N, offsets, lengths = ids.values_N.numpy(), ids.offsets.numpy(), ids.lengths.numpy()
        odd_N = np.flatnonzero(values_N >> 1 == 0)  # 0 and 1
        row_N = np.searchsorted(offsets, odd_N, "right") - 1
        add(row_N[values_N[odd_N] == UNKNOWN], unknown=True)
        row_N = row_N[values_N[odd_N] == MISSING]
        add(row_N[~is_list[np.searchsorted(first_F, row_N, "right") - 1]], unknown=False)
        empty_N = np.flatnonzero(lengths == 0)
        add(empty_N[is_list[np.searchsorted(first_F, empty_N, "right") - 1]], unknown=False)
    if crossed.known is not None:
        key = crossed.known.key
        for gap, unknown_B in zip(found, np.split(crossed.known.unknown_B, ends), strict=True):
            if unknown_B.any():
                gap.unknown[key] = max(gap.unknown.get(key, 0), int(unknown_B.sum()))
    for name in schema.dense:
        if schema.columns[name].transform != "missing":
            _numbers(schema, name, crossed, asked, found)
    return found


def _numbers(schema: Schema, name: str, crossed: Crossed, asked: Sequence[Asked], found: list[Gaps]) -> None:
    """Count missing numbers: those that the model is told of, else the nulls."""
    source, told = schema.columns[name].source or name, missing_of(name)
    if told in schema.dense:
        missing_B = crossed.batch.dense_BC[:, schema.dense.index(told)].numpy() > 0
        each = np.split(missing_B, np.cumsum(crossed.counts)[:-1])
        counts = [int(part.sum()) for part in each]
    elif (part := crossed.known and crossed.known.parts.get(name)) and part.numbers is not None:
        counts = [int(np.isnan(x_N).sum()) for x_N in np.split(part.numbers, np.cumsum(crossed.counts)[:-1])]
    else:
        counts = [one.candidates[source].count(None) if source in one.candidates else 0 for one in asked]
    for one, gap, count in zip(asked, found, counts, strict=True):
        if source in one.user:
            count = int(count > 0 or one.user[source] is None)
        if count:
            gap.missing[source] = count
