"""Work done a step ahead, by a thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def ahead(items: Iterable[T], name: str = "sparrow-ahead", depth: int = 1) -> Iterator[T]:
    """Returns the same items; a thread makes the next ones while one is used. It ends with the iteration.

    Args:
        items: what is to be made ahead.
        name: of the thread.
        depth: how many items are made ahead.
    """
    iterator, end = iter(items), object()
    pool = ThreadPoolExecutor(1, thread_name_prefix=name)
    try:
        coming = deque(pool.submit(next, iterator, end) for _ in range(depth))
        while (item := coming.popleft().result()) is not end:
            coming.append(pool.submit(next, iterator, end))
            yield item  # type: ignore[misc]
    finally:
        pool.shutdown(cancel_futures=True)
