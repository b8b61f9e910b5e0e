"""What torchrun says of itself, and what it is told about the error that ends a rank.

Its last lines have that error, and each host prints it once.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from sparrow.core.errors import LostRankError, UserError

_HOOKS: list[object] = []


def record(text: str) -> None:
    """Write the file in which torchrun looks for the error of a rank. Without torchrun nothing is
    written.
    """
    if (file := os.environ.get("TORCHELASTIC_ERROR_FILE")) is None:
        return
    extra = {"py_callstack": text, "timestamp": str(int(time.time()))}  # torchrun prints the former
    with suppress(OSError):
        Path(file).write_text(
            json.dumps({"message": {"message": text, "extraInfo": extra}}), encoding="utf-8"
        )


def is_first(error: BaseException) -> bool:
    """Returns whether no other rank of this host has asked about the same error, so that this one
    is to print it.
    """
    if (file := os.environ.get("TORCHELASTIC_ERROR_FILE")) is None:
        return True
    cause = error.cause if isinstance(error, LostRankError) else str(error)
    digest = hashlib.sha256(cause.encode()).hexdigest()[:16]
    try:  # in the folder that torchrun has made for this attempt: one rank alone makes the file
        (Path(file).parents[1] / f"sparrow-{digest}").touch(exist_ok=False)
    except OSError as error:
        return not isinstance(error, FileExistsError)
    return True


def record_uncaught() -> None:
    """From now on `record` an error that ends the program, and print a UserError only where it
    `is_first`.
    """
    if _HOOKS or "TORCHELASTIC_ERROR_FILE" not in os.environ:
        return
    before = sys.excepthook
    _HOOKS.append(before)

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        is_ours = isinstance(error, UserError)
        record(
            str(error)
            if is_ours
            else "".join(traceback.format_exception(kind, error, trace)).strip()
        )
        if not is_ours or is_first(error):
            before(kind, error, trace)

    sys.excepthook = hook


def launcher() -> str:
    """Returns the name of the torchrun agent that started this process, or "" without one. No other
    agent has it.

    It is the name of the folder that an agent makes for itself.
    """
    return os.environ.get("TORCHELASTIC_ERROR_FILE", "").partition("/attempt_")[0]
