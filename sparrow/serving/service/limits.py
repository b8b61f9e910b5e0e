"""What a service refuses, so that its memory and its latency are bounded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sparrow.core.errors import UserError, require

PYTHON = 22  # bytes of Python values that a byte of JSON may become: `[],` is three, and its list and pointer are 64


class RefusedError(Exception):
    """An answer that is no score. status: of HTTP. remedy: one line that names place, value and remedy."""

    def __init__(self, status: int, remedy: str) -> None:
        super().__init__(remedy)
        self.status = status


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a service takes.

    Args:
        deadline_ms: how long after its arrival a request may be answered, unless it asks for less.
        body_mb: of one request.
        held_mb: of all requests that are being read, wait or are scored.
        candidates: of one request, and of a batch of several.
        queue: requests that wait.
        connections: that are open.
        read_s: how long the body of a request may take to arrive.
        extra: what becomes of a request with a column that the model does not read.

    Raises:
        UserError: for a number that is out of range.
    """

    deadline_ms: float = 100.0
    body_mb: float = 4.0
    held_mb: float = 32.0
    candidates: int = 5_000
    queue: int = 256
    connections: int = 1_000
    read_s: float = 5.0
    extra: Literal["refuse", "ignore"] = "refuse"

    def __post_init__(self) -> None:
        require(above=0, most=3.6e6, deadline_ms=self.deadline_ms)
        require(above=0, most=1e6, body_mb=self.body_mb, held_mb=self.held_mb, read_s=self.read_s)
        require(least=1, most=1e7, candidates=self.candidates, queue=self.queue, connections=self.connections)
        if self.held_mb < self.body_mb:
            raise UserError(f"held_mb: {self.held_mb:g} is less than body_mb, {self.body_mb:g}; give as much or more")

    @property
    def memory_mb(self) -> float:
        """The most that requests take at a time, as bytes and as Python values."""
        return (1 + PYTHON) * self.held_mb
