"""Ids that a table does not hold: they take its `oov_row`, or are an error that names table,
feature and position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from sparrow.core import UserError
from sparrow.embeddings.spec import TableSpec


def replace_ids(
    values_N: Tensor,
    bounds: Sequence[int],
    specs: Sequence[tuple[str, TableSpec] | None],
    counts_K: Tensor,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the ids with each table's `oov_row` in the place of those outside it, and feature ->
    how many these are.

    Args:
        values_N: the ids, key by key.
        bounds: where the ids of each key begin, and where the last ones end.
        specs: the feature and the table of each key; None where nobody looks it up.
        counts_K: how many ids of each key are outside its table.

    Raises:
        UserError: for an id of a table without `oov_row`, on a CPU. On a GPU, asking at once would
            stall it.
    """
    original_N = values_N
    values_N = values_N.clone()
    outside: dict[str, Tensor] = {}
    for k, feature_spec in enumerate(specs):
        if feature_spec is None:
            continue
        feature, spec = feature_spec
        limit = spec.addressing.ids
        part_N = values_N[bounds[k] : bounds[k + 1]]
        if limit is None or (not part_N.is_cuda and not counts_K[k]):
            continue
        is_outside_N = (part_N < 0) | (part_N >= limit)
        if spec.oov_row is None and not part_N.is_cuda:
            position = int(is_outside_N.nonzero()[0])
            value = f"id {int(original_N[bounds[k] + position])} at position {position}"
            remedy = "give the table more rows, hashed addressing or an oov_row"
            if spec.addressing.traits.policy:
                remedy = "ids are numbers of 63 bits"
            raise UserError(f"{_place(feature, spec)}: {value} is outside {_range(spec)}; {remedy}")
        part_N.masked_fill_(is_outside_N, spec.oov_row or 0)
        outside[feature] = outside.get(feature, 0) + counts_K[k]
    return values_N, outside


def require_none(specs: Mapping[str, TableSpec], outside: dict[str, Tensor | int]) -> None:
    """Check that no id was outside a table without `oov_row`.

    Args:
        specs: feature -> its table.
        outside: feature -> how many of its ids were. Those of features that were checked are taken
            out.

    Raises:
        UserError: names the first feature that had such ids.
    """
    for feature, spec in specs.items():
        if spec.oov_row is None and (count := int(outside.pop(feature, 0))):
            raise UserError(f"{_place(feature, spec)}: {count} ids are outside {_range(spec)}")


def _place(feature: str, spec: TableSpec) -> str:
    return f"table {spec.name!r}, feature {feature!r}"


def _range(spec: TableSpec) -> str:
    return f"[0, {spec.addressing.ids})"
