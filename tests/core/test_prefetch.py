"""Work done a step ahead: the same items, one thread, and nobody who waits for it when it is given
up.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest

from sparrow.core.prefetch import prefetch


def threads_of(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(name)]


@pytest.mark.parametrize("depth", [1, 3])
def test_the_same_items_and_no_thread_afterwards(depth: int) -> None:
    assert list(prefetch(range(7), "all-of-it", depth)) == list(range(7))
    assert not threads_of("all-of-it")


def test_an_error_comes_where_its_item_would() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise ValueError("no second")

    iteration = prefetch(items(), "an-error")
    assert next(iteration) == 1
    with pytest.raises(ValueError, match="no second"):
        next(iteration)
    assert not threads_of("an-error")


def slow(begun: threading.Event, release: threading.Event) -> Iterator[int]:
    """One item, and another one when it is let go. begun: set when it waits for that."""
    yield 1
    begun.set()
    release.wait()
    yield 2


@pytest.mark.parametrize("way", ["close", "collector"])
def test_nobody_waits_for_the_thread_of_an_iteration_that_is_given_up(way: str) -> None:
    """The collector may run while a new thread holds the lock that the end of another one needs: it
    never came back.

    Here the thread cannot end until this one lets it go, so who waits for it waits for ever.
    """
    begun, release = threading.Event(), threading.Event()
    iteration = prefetch(slow(begun, release), f"given-up-{way}")
    assert next(iteration) == 1 and begun.wait(60)
    (thread,) = threads_of(f"given-up-{way}")
    is_done = threading.Event()

    def give_up(holder: list[object]) -> None:
        if way == "close":
            holder[0].close()  # type: ignore[attr-defined]
        holder.append(holder)  # a circle, which only the collector undoes
        holder = []
        gc.collect()
        is_done.set()

    holders: list[list[object]] = [[iteration]]
    del iteration
    closing = threading.Thread(target=lambda: give_up(holders.pop()), daemon=True)
    closing.start()
    assert is_done.wait(60), "it waits for a thread"
    assert thread.is_alive()
    release.set()
    thread.join(60)
    assert not thread.is_alive()
