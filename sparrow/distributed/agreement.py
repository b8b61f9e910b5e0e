"""How all ranks of a job agree: rank 0 says something to all, or all compare what they have."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from sparrow.core.errors import UserError
from sparrow.distributed.world import Lobby, World

T = TypeVar("T")
SHOWN = 3  # differences that an error names


def said(world: World | Lobby, what: str, find: Callable[[], T]) -> T:
    """Returns on every rank what `find` returns on rank 0; it runs only there.

    Args:
        world: the ranks.
        what: what it is about, for errors.
        find: returns plain data.

    Raises:
        UserError: on every rank, when `find` raises one.
    """
    if world.size == 1:
        return find()
    told: dict[str, Any] = {}
    if world.rank == 0:
        try:
            told["found"] = find()
        except UserError as error:
            told["error"] = str(error)
    told = world.told(what, told)
    if "error" in told:
        raise UserError(told["error"])
    found: T = told["found"]
    return found


def everywhere(world: World, what: str, find: Callable[[], T]) -> T:
    """Returns what `find` returns on this rank. If it raises UserError on some ranks, all raise the first of these."""
    if world.size == 1:
        return find()
    error = ""
    try:
        found = find()
    except UserError as raised:
        error = str(raised)
    if first := next(filter(None, world.gathered(what, error)), ""):
        raise UserError(first)
    return found


def check_same(world: World, what: str, values: Mapping[str, Any]) -> None:
    """Raise UserError, the same on every rank, when ranks have different values; it names keys, ranks and values.

    values: name -> plain data. Only digests are sent, and the values only if the digests differ.
    """
    digest = hashlib.sha256(json.dumps(values).encode()).hexdigest()
    if len(set(world.gathered(what, digest))) == 1:
        return
    everyone = world.gathered(what, values)
    keys = dict.fromkeys(key for values in everyone for key in values)
    told = [line for key in keys if (line := _difference(key, [values.get(key) for values in everyone]))]
    more = f"; and {len(told) - SHOWN} more" if len(told) > SHOWN else ""
    raise UserError(
        f"the ranks do not run the same job: {'; '.join(told[:SHOWN])}{more}; start all of them with the same command, "
        "the same files and the same Sparrow"
    )


def _difference(key: str, values: Sequence[Any]) -> str:
    """Returns one line about a key, or "" if all ranks have the same value. The most frequent value comes last."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault("unset" if value is None else json.dumps(value), []).append(rank)
    if len(ranks) == 1:
        return ""
    *others, (common, holders) = sorted(ranks.items(), key=lambda item: len(item[1]))
    told = [f"{value} on {_named(of)}" for value, of in others]
    return f"{key}: {', '.join(told)}, {common} on {'the others' if len(holders) > 1 else _named(holders)}"


def _named(ranks: Sequence[int]) -> str:
    runs = [[rank for _, rank in run] for _, run in itertools.groupby(enumerate(ranks), lambda pair: pair[1] - pair[0])]
    told = ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {told}"
