"""What may hang, such as a disk that does not answer: how a process says that it goes on, and how
to wait no longer.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from sparrow.core.errors import UserError

BEAT_S = 1.0  # how often a process says that it goes on
# of the processor, which counts as going on: a disk that is slow takes more for each second of
# waiting
_WORK_S = 1e-3


@contextmanager
def working(say: Callable[[], object]) -> Iterator[None]:
    """Within it, call `say` each second in which this process has used its processors, and not
    while it waits.

    A thread calls it. So who loads a model for long can be told from who waits for ever.
    """
    over = threading.Event()

    def watch() -> None:
        last = 0.0
        while not over.wait(BEAT_S):
            used = time.process_time() - time.thread_time()  # of the other threads
            if used - last >= _WORK_S:
                last = used
                with suppress(OSError):  # nobody listens any more
                    say()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


async def in_thread(
    place: object, seconds: float, work: Callable[..., Any], *arguments: Any
) -> Any:
    """Run a function that looks at files. The event loop goes on, and so does the end of the
    process.

    Args:
        place: of the files, for the error.
        seconds: how long to wait for it. The thread stays behind.
        work: the function.
        arguments: its arguments.

    Raises:
        UserError: when it takes longer.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def run() -> None:
        result = None
        failure = None
        try:
            result = work(*arguments)
        except Exception as error:
            failure = error
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, result, failure)

    # one of a pool would be waited for at the end
    threading.Thread(target=run, daemon=True).start()
    try:
        async with asyncio.timeout(seconds):  # Python 3.11's wait_for may swallow a cancellation
            return await future
    except TimeoutError:
        raise UserError(
            f"{place}: does not answer for {seconds:g} s; see to its disk, and try again"
        ) from None
