"""Signals that ask a run to stop."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class StopRequest:
    """A SIGTERM or a SIGINT. All ranks stop after the same step.

    signal: the name of the one that came to this rank. reason: why the run stops, as soon as it is
    to.

    Args:
        alone: whether there is one rank, so that none has to hear of it first.
    """

    def __init__(self, alone: bool) -> None:
        self.signal: str | None = None
        self.reason: str | None = None
        self._alone = alone

    @contextmanager
    def heeding(self) -> Iterator[None]:
        """In this context signals count. Only a process's main thread can have a handler."""
        is_main = threading.current_thread() is threading.main_thread()
        before = {
            number: signal.signal(number, self.receive)
            for number in (signal.SIGTERM, signal.SIGINT)
            if is_main
        }
        try:
            yield
        finally:
            for number, own in before.items():
                signal.signal(number, own)

    def obey(self) -> None:
        """All ranks know that one of them was asked."""
        self.reason = self.signal or "a signal to another rank"

    def receive(self, number: int, frame: object) -> None:
        """A signal came."""
        self.signal = signal.Signals(number).name
        if self._alone:
            self.reason = self.signal
