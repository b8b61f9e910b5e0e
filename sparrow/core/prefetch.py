"""Work done a step ahead, by a thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def prefetch(items: Iterable[T], name: str = "sparrow-ahead", depth: int = 1) -> Iterator[T]:
    """Returns the same items; a thread makes the next ones while one is used. It ends with the
    iteration.

    An iteration that is given up ends as soon as the item is made that the thread is at. Nobody
    waits for it: the garbage collector may give it up, in any thread and within any lock, also
    within one that the end of a thread needs.

    Args:
        items: what is to be made ahead.
        name: of the thread.
        depth: how many items are made ahead.
    """
    iterator = iter(items)
    end = object()
    pool = ThreadPoolExecutor(1, thread_name_prefix=name)
    is_given_up = False
    try:
        coming = deque(pool.submit(next, iterator, end) for _ in range(depth))
        while (item := coming.popleft().result()) is not end:
            coming.append(pool.submit(next, iterator, end))
            yield item  # type: ignore[misc]
    except GeneratorExit:
        is_given_up = True
        raise
    finally:
        pool.shutdown(wait=not is_given_up, cancel_futures=True)
