"""How ranks that should have the same values differ, in words."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import chain, groupby
from typing import Any

SHOWN = 3  # differences that an error names


def describe(values_of_ranks: Sequence[Mapping[str, Any]]) -> str:
    """Returns a line that names keys, ranks and values that differ. values_of_ranks: name -> plain
    data, by rank.
    """
    differences: list[str] = []
    for key in dict.fromkeys(chain.from_iterable(values_of_ranks)):
        line = _difference(key, [values.get(key) for values in values_of_ranks])
        if line:
            differences.append(line)
    rest = f"; and {len(differences) - SHOWN} more" if len(differences) > SHOWN else ""
    return (
        f"the ranks do not run the same job: {'; '.join(differences[:SHOWN])}{rest}; start all of"
        " them with the same command, the same files and the same Sparrow"
    )


def _difference(key: str, values: Sequence[Any]) -> str:
    """Returns one line about a key, or "" if all ranks have the same value. The most frequent value
    comes last.
    """
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault("unset" if value is None else json.dumps(value), []).append(rank)
    if len(ranks) == 1:
        return ""
    *minority, (common, holders) = sorted(ranks.items(), key=lambda item: len(item[1]))
    parts = [f"{value} on {_ranks_in_words(deviants)}" for value, deviants in minority]
    majority = "the others" if len(holders) > 1 else _ranks_in_words(holders)
    return f"{key}: {', '.join(parts)}, {common} on {majority}"


def _ranks_in_words(ranks: Sequence[int]) -> str:
    runs = [
        [rank for _, rank in run]
        for _, run in groupby(enumerate(ranks), lambda pair: pair[1] - pair[0])
    ]
    parts = ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {parts}"
