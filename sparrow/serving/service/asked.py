"""A request as protocols make it: the columns of a user and of her candidates, in the log's own names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sparrow.core.errors import UserError, listed, suggest
from sparrow.serving.service.limits import Limits, RefusedError


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What is to be scored.

    Args:
        user: column -> value, the same for all candidates.
        candidates: column -> list of `count` values.
        count: how many candidates there are.
        ignored: columns that were given and are not read.
        deadline_ms: how long after its arrival it may be answered; None for that of the service.
    """

    user: Mapping[str, Any]
    candidates: Mapping[str, list[Any]]
    count: int
    ignored: tuple[str, ...] = ()
    deadline_ms: float | None = None

    @property
    def kind(self) -> tuple[frozenset[str], frozenset[str]]:
        """Requests of one kind may share a batch."""
        return frozenset(self.user), frozenset(self.candidates)


def checked(
    user: Mapping[str, Any],
    candidates: Mapping[str, list[Any]],
    sources: frozenset[str],
    limits: Limits,
    deadline_ms: float | None = None,
) -> Asked:
    """Returns a request that has every column once.

    Args:
        user, candidates, deadline_ms: see `Asked`.
        sources: the columns that the model reads.
        limits: of the service.

    Raises:
        UserError: for columns that are absent, given twice or not known, for lists of unequal length, and for a bad
            deadline.
        RefusedError: for too many columns or candidates.
    """
    if (columns := len(user) + len(candidates)) > limits.columns:
        raise RefusedError(413, f"columns: {columns} of them, {limits.columns} are allowed; leave out what is not read")
    lengths = {name: len(values) for name, values in candidates.items()}
    count = next(iter(lengths.values()), 0)
    for name, length in lengths.items():
        if length != count:
            first = next(iter(lengths))
            raise UserError(f"candidates.{name}: {length} values where {first!r} has {count}; give as many")
    if count > limits.candidates:
        raise RefusedError(413, f"candidates: {count} of them, {limits.candidates} are allowed; split the request")
    if both := user.keys() & candidates.keys():
        raise UserError(f"user.{min(both)}: is a column of the candidates too; give it once")
    given = user.keys() | candidates.keys()
    if absent := sources - given:
        told = listed(sorted(map(repr, absent)))
        raise UserError(f"no column {told}; give null where there is no value{suggest(min(absent), given)}")
    ignored = tuple(sorted(given - sources))
    if ignored and limits.extra == "refuse":
        told = listed(list(map(repr, ignored)))
        raise UserError(f"column {told}: the model does not read it; leave it out, or serve with --extra ignore")
    if ignored:
        user = {name: value for name, value in user.items() if name in sources}
        candidates = {name: values for name, values in candidates.items() if name in sources}
    if deadline_ms is not None and not deadline_ms > 0:
        raise UserError(f"deadline: {deadline_ms:g} ms; give a number above 0")
    return Asked(user=user, candidates=candidates, count=count, ignored=ignored, deadline_ms=deadline_ms)
