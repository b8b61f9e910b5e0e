from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

MOST = 8  # pieces of work that wait, with what they hold in memory


class Aside:
    """Work that the next step does not wait for: one thread does it, piece by piece in order.

    An error comes out of a later call. Whoever reads what the work writes calls `wait` before.
    """

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._waiting: deque[Future[Any]] = deque()

    def do(self, work: Callable[..., Any], *arguments: Any) -> None:
        """Do the work behind what was given before; wait when MOST pieces are undone."""
        self._waiting.append(self._pool.submit(work, *arguments))
        while self._waiting and (self._waiting[0].done() or len(self._waiting) > MOST):
            self._waiting.popleft().result()

    def wait(self) -> None:
        """Wait until all work is done; raises what went wrong."""
        while self._waiting:
            self._waiting.popleft().result()

    def end(self) -> None:
        """Let go of the thread, with what it has not begun."""
        self._pool.shutdown(cancel_futures=True)
        self._waiting.clear()


@contextmanager
def threads_given_back() -> Iterator[None]:
    """Sets torch's number of threads back at the end: a small run's are too few for what comes next in a process."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)
