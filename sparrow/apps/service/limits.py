"""What a service refuses, so that its memory and its latency are bounded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from sparrow.core.errors import UserError, require

# bytes of Python values that a byte of JSON may become: `{"":[]},` is eight, and its dict and list
# are 254
PYTHON = 33
GONE = "sparrow.gone"  # in the scope of a request: to be called when its client has gone
RETRY_S = 1  # what a client is told to wait when the service is full
_LONGEST = 500  # characters of an error, which may name what the client has sent


class RefusedError(Exception):
    """An answer that is no score.

    Args:
        status: of HTTP.
        remedy: one line that names place, value and remedy.
        allow: the methods of HTTP that are answered, where another one was asked for.
    """

    def __init__(self, status: int, remedy: str, allow: str = "") -> None:
        remedy = " ".join(remedy.split())
        super().__init__(remedy if len(remedy) <= _LONGEST else remedy[:_LONGEST] + " ...")
        self.status = status
        self.allow = allow

    @property
    def retry_s(self) -> int | None:
        """After how many seconds the same request may be answered; None when it never will."""
        return RETRY_S if self.status in (429, 503) else None


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a service takes.

    Args:
        deadline_ms: a request is answered within this time of its arrival, or of less if it asks
            so, or refused with 503.
        body_mb: the most that a request may have; else 413.
        held_mb: the most that all requests of a worker at a time may have, read, waiting or scored;
            else 429.
        candidates: the most that a request may have, and a batch of several; else 413.
        queue: the most requests that may wait in a worker; else 429.
        columns: the most that a request may have; else 413.
        list_values: the most that a list may have; else 413.
        all_values: the most that all lists of a request may have; else 413.
        connections: the most that a worker may have open; else 503.
        header_kb: the most that the headers of a request may have; else 431.
        read_s: the headers of a request arrive within this time, and then its body; else 408.
        write_s: a client reads its answer within this time, or its connection is closed.
        extra: "refuse" answers 400 to a column that the model does not read, "ignore" names it in
            the answer.

    Raises:
        UserError: for a number that is out of range.
    """

    deadline_ms: float = 100.0
    body_mb: float = 4.0
    held_mb: float = 32.0
    candidates: int = 5_000
    queue: int = 256
    columns: int = 1_000
    list_values: int = 10_000
    all_values: int = 200_000
    connections: int = 1_000
    header_kb: float = 16.0
    read_s: float = 5.0
    write_s: float = 5.0
    extra: Literal["refuse", "ignore"] = "refuse"

    def __post_init__(self) -> None:
        require(above=0, most=3.6e6, deadline_ms=self.deadline_ms)
        require(
            above=0, most=1e6, body_mb=self.body_mb, held_mb=self.held_mb, header_kb=self.header_kb
        )
        require(above=0, most=1e6, read_s=self.read_s, write_s=self.write_s)
        require(least=1, most=1e7, columns=self.columns)
        require(least=1, most=1e9, list_values=self.list_values, all_values=self.all_values)
        require(
            least=1,
            most=1e7,
            candidates=self.candidates,
            queue=self.queue,
            connections=self.connections,
        )
        if self.held_mb < self.body_mb:
            raise UserError(
                f"held_mb: {self.held_mb:g} is less than body_mb, {self.body_mb:g}; give as much or"
                " more"
            )

    @property
    def memory_mb(self) -> float:
        """The most that requests take at a time, as bytes and as Python values."""
        return (1 + PYTHON) * self.held_mb

    def check_lists(
        self, user: Mapping[str, Any], candidates: Mapping[str, list[Any]], names: Iterable[str]
    ) -> None:
        """Refuse a request with a list that is too long, or with too many values in all of its
        lists.

        Args:
            user, candidates: see `Request`.
            names: the columns that hold lists.

        Raises:
            RefusedError: for such a list, and for so many values.
        """
        total = 0
        for name in names:
            values = [user[name]] if name in user else candidates.get(name, ())
            lengths = [len(value) for value in values if isinstance(value, list)]
            total += sum(lengths)
            if (longest := max(lengths, default=0)) > self.list_values:
                raise RefusedError(
                    413,
                    f"column {name!r}: a list of {longest}, {self.list_values} are allowed; cut it",
                )
        if total > self.all_values:
            raise RefusedError(
                413,
                f"lists: {total} values in all, {self.all_values} are allowed; split the request",
            )
