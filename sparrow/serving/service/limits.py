"""What a service refuses, so that its memory and its latency are bounded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from sparrow.core.errors import UserError, require

PYTHON = 33  # bytes of Python values that a byte of JSON may become: `{"":[]},` is eight, and its dict and list are 254
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
        self.status, self.allow = status, allow

    @property
    def retry_s(self) -> int | None:
        """After how many seconds the same request may be answered; None when it never will."""
        return RETRY_S if self.status in (429, 503) else None


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a service takes.

    Args:
        deadline_ms: how long after its arrival a request may be answered, unless it asks for less.
        body_mb: of one request.
        held_mb: of all requests that are being read, wait or are scored.
        candidates: of one request, and of a batch of several.
        queue: requests that wait.
        columns: of one request.
        list_values: of one list.
        all_values: of all lists of a request.
        connections: that are open.
        header_kb: of one request.
        read_s: how long the headers of a request may take to arrive, and then its body.
        write_s: how long a client may take to read its answer.
        extra: what becomes of a request with a column that the model does not read.

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
        require(above=0, most=1e6, body_mb=self.body_mb, held_mb=self.held_mb, header_kb=self.header_kb)
        require(above=0, most=1e6, read_s=self.read_s, write_s=self.write_s)
        require(least=1, most=1e7, columns=self.columns)
        require(least=1, most=1e9, list_values=self.list_values, all_values=self.all_values)
        require(least=1, most=1e7, candidates=self.candidates, queue=self.queue, connections=self.connections)
        if self.held_mb < self.body_mb:
            raise UserError(f"held_mb: {self.held_mb:g} is less than body_mb, {self.body_mb:g}; give as much or more")

    @property
    def memory_mb(self) -> float:
        """The most that requests take at a time, as bytes and as Python values."""
        return (1 + PYTHON) * self.held_mb

    def check_lists(self, user: Mapping[str, Any], candidates: Mapping[str, list[Any]], names: Iterable[str]) -> None:
        """Refuse a request with a list that is too long, or with too many values in all of its lists.

        Args:
            user, candidates: see `Asked`.
            names: the columns that hold lists.

        Raises:
            RefusedError: for such a list, and for so many values.
        """
        total = 0
        for name in names:
            each = [user[name]] if name in user else candidates.get(name, ())
            lengths = [len(value) for value in each if isinstance(value, list)]
            total += sum(lengths)
            if (longest := max(lengths, default=0)) > self.list_values:
                raise RefusedError(413, f"column {name!r}: a list of {longest}, {self.list_values} are allowed; cut it")
        if total > self.all_values:
            raise RefusedError(413, f"lists: {total} values in all, {self.all_values} are allowed; split the request")
