"""A request as protocols make it: the columns of a user and of her candidates, in the log's own
names.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import msgspec

from sparrow.apps.service.limits import Limits, RefusedError
from sparrow.core.errors import UserError, listed

One = None | bool | int | float | str
Value = One | list[One]
T = TypeVar("T")


class Sources(NamedTuple):
    """Where the columns of a request come from.

    read: those that the model reads. key: the column of candidates by which a catalogue gives the
    columns `items`. user_key: the column by which a store may give all others.
    """

    read: frozenset[str]
    key: str | None = None
    items: frozenset[str] = frozenset()
    user_key: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What is to be scored.

    Args:
        user: column -> value, the same for all candidates.
        candidates: column -> list of `count` values.
        count: how many candidates there are.
        ignored: columns that were given and are not read.
        absent: columns that are to come from the store of users.
        deadline_ms: how long after its arrival it may be answered; None for that of the service.
        is_trial: whether it asks what a request would be. It does not count as one.
    """

    user: Mapping[str, Any]
    candidates: Mapping[str, list[Any]]
    count: int
    ignored: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    deadline_ms: float | None = None
    is_trial: bool = False

    @property
    def kind(self) -> tuple[frozenset[str], frozenset[str], bool]:
        """Requests of one kind may share a batch."""
        return frozenset(self.user), frozenset(self.candidates), self.is_trial


def decode_body(
    decode: Callable[[bytes | memoryview], T], body: bytes | memoryview, like: str
) -> T:
    """Decode a body.

    Args:
        decode: of a `msgspec.json.Decoder`.
        body: JSON.
        like: what bodies are to be, in words.

    Raises:
        UserError: for another body.
    """
    try:
        return decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        problem = str(error)
        if isinstance(error, UnicodeDecodeError):
            problem = "is not UTF-8"
        elif problem == "Input data was truncated":
            problem = "ends too early" if body else "is empty"
        raise UserError(f"body: {problem}; send {like}") from None


def check_request(
    user: Mapping[str, Any],
    candidates: Mapping[str, list[Any]],
    sources: Sources,
    limits: Limits,
    deadline_ms: float | None = None,
) -> Request:
    """Check columns, and make a request of them. It has every column once, but for those that are
    looked up.

    Args:
        user, candidates, deadline_ms: see `Request`.
        sources: where the columns come from.
        limits: of the service.

    Raises:
        UserError: for columns that are absent, given twice or not known, for lists of unequal
            length, and for a bad deadline.
        RefusedError: for too many columns or candidates.
    """
    if (columns := len(user) + len(candidates)) > limits.columns:
        raise RefusedError(
            413,
            f"columns: {columns} of them, {limits.columns} are allowed; leave out what is not read",
        )
    lengths = {name: len(values) for name, values in candidates.items()}
    count = next(iter(lengths.values()), 0)
    for name, length in lengths.items():
        if length != count:
            first = next(iter(lengths))
            raise UserError(
                f"candidates.{name}: {length} values where {first!r} has {count}; give as many"
            )
    if count > limits.candidates:
        raise RefusedError(
            413, f"candidates: {count} of them, {limits.candidates} are allowed; split the request"
        )
    if twice := user.keys() & candidates.keys():
        raise UserError(f"user.{min(twice)}: is a column of the candidates too; give it once")
    present = user.keys() | candidates.keys()
    known = sources.read | {sources.key, sources.user_key}
    absent = sources.read - present - (sources.items if sources.key in candidates else frozenset())
    if absent and sources.user_key not in present:
        # it takes long for what is long
        near = difflib.get_close_matches(min(absent)[:100], present - known, n=1)
        hint = f"; {near[0]!r} is no column of the model: is it meant?" if near else ""
        raise UserError(
            f"no column {listed(sorted(map(repr, absent)))}; give null where there is no"
            f" value{hint}"
        )
    ignored = tuple(sorted(present - known))
    if ignored and limits.extra == "refuse":
        names = listed(list(map(repr, ignored)))
        raise UserError(
            f"column {names}: the model does not read it; leave it out, or serve with --extra"
            " ignore"
        )
    if ignored:
        user = {name: value for name, value in user.items() if name in known}
        candidates = {name: values for name, values in candidates.items() if name in known}
    if deadline_ms is not None and not deadline_ms > 0:
        raise UserError(f"deadline: {deadline_ms:g} ms; give a number above 0")
    return Request(
        user=user,
        candidates=candidates,
        count=count,
        ignored=ignored,
        absent=tuple(sorted(absent)),
        deadline_ms=deadline_ms,
    )
