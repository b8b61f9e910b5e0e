"""SIGTERM ends a program as Ctrl-C does: with its folders of unfinished work removed."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType


class Terminated(KeyboardInterrupt):
    """This program was asked to end by SIGTERM."""


def unwind_on_sigterm() -> None:
    """Raise `Terminated` in the main thread on SIGTERM, unless it is ignored or handled already.

    Without it a SIGTERM ends the program at once, and what it was making stays on the disk. Forked
    children, which some libraries end by SIGTERM, still end at once.
    """
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
    ):
        return
    program = os.getpid()

    def unwind(number: int, frame: FrameType | None) -> None:
        if os.getpid() == program:
            raise Terminated
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, unwind)
