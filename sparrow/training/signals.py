from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def heeding(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """In this context a handler gets SIGTERM and SIGINT. Only a process's main thread can have
    one.
    """
    is_main = threading.current_thread() is threading.main_thread()
    before = {
        number: signal.signal(number, handler)
        for number in (signal.SIGTERM, signal.SIGINT)
        if is_main
    }
    try:
        yield
    finally:
        for number, own in before.items():
            signal.signal(number, own)
