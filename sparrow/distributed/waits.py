"""What a rank waits for. A watch can end these waits; Gloo's own end after a time-out alone."""

from __future__ import annotations

import ctypes
import itertools
import math
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

SLICE = timedelta(seconds=1)
FOREVER = timedelta(days=365)
Tensors: TypeAlias = list[Tensor]


class LostError(RuntimeError):
    """A wait was ended, because a rank that it is for does not answer any more."""


class Waits:
    """The waits of a rank that have begun and not ended.

    reason: why all of them were ended, "" as long as none was.
    """

    def __init__(self) -> None:
        self.reason = ""
        self._numbers = itertools.count(1)
        self._open: set[int] = set()
        self._futures: dict[int, Future[Tensor]] = {}

    @property
    def oldest(self) -> int:
        """The number of the wait that began first, 0 where there is none. No two waits have one
        number.
        """
        return min(list(self._open), default=0)

    def finish(self, work: dist.Work, limit_s: float = math.inf) -> None:
        """Wait for a collective on tensors of the host.

        Args:
            work: the collective. It has a time-out too.
            limit_s: how long to wait at most.

        Raises:
            LostError: when `end` was called meanwhile.
            RuntimeError: when the collective failed.
        """
        number = next(self._numbers)
        begun = time.monotonic()
        self._open.add(number)
        try:
            while not self._is_over(work):
                if self.reason:
                    raise LostError(self.reason)
                if time.monotonic() - begun > limit_s:
                    raise RuntimeError(f"Timed out after {limit_s:g} s")
        finally:
            self._open.discard(number)

    def _is_over(self, work: dist.Work) -> bool:
        """Wait for a slice of time. Returns whether the collective is over."""
        try:
            work.wait(SLICE)
        except RuntimeError:
            if not work.is_completed():
                return False
            work.wait()  # it raises its own error, or has ended meanwhile
        return True

    def future(
        self, begun: Future[Tensors], finish: Callable[[Future[Tensors]], Tensor]
    ) -> Future[Tensor]:
        """Returns a future of what `finish` makes of a collective on tensors of the host. `end`
        ends it too.
        """
        number = next(self._numbers)
        result: Future[Tensor] = torch.futures.Future()
        self._futures[number] = result
        self._open.add(number)

        def settle(begun: Future[Tensors]) -> None:
            self._open.discard(number)
            if self._futures.pop(number, None) is None:  # it was ended
                return
            try:
                result.set_result(finish(begun))
            except Exception as error:
                result.set_exception(error)  # type: ignore[arg-type]  # torch says Tensor

        begun.add_done_callback(settle)
        return result

    def end(self, reason: str) -> None:
        """End all waits, and those that come, for one reason."""
        self.reason = reason
        for number in list(self._futures):
            if (future := self._futures.pop(number, None)) is not None:
                future.set_exception(LostError(reason))  # type: ignore[arg-type]


def keep_for_ever(group: dist.ProcessGroup) -> None:
    """Never take a group apart. It would wait for its collectives, and so would the end of the
    process.
    """
    for held in (group, *_backends(group)):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))


def _backends(group: dist.ProcessGroup) -> list[object]:
    backends: list[object] = []
    for device in ("cpu", "cuda"):
        with suppress(RuntimeError):  # it has none for this device
            backends.append(group._get_backend(torch.device(device)))
    return backends


def broadcast(value: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Begin to send rank 0's tensor of the host to all ranks, which wait for it without a
    time-out.
    """
    options = dist.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    options.timeout = FOREVER
    return group.broadcast([value], options)
