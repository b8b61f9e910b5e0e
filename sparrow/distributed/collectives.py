"""Blocks of bytes and tensors between ranks, begun now and awaited later, and counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


class Pending(Generic[T]):
    """Something that is under way; `wait` gives it, once or more often."""

    def __init__(self, finish: Callable[[], T]) -> None:
        self._finish: Callable[[], T] | None = finish
        self._value: T

    def wait(self) -> T:
        """Until it is there."""
        if self._finish is not None:
            self._value, self._finish = self._finish(), None
        return self._value


class Meter:
    """Bytes handed to collectives: (what for, kind of link) -> bytes.

    Links: "self" (a rank's own part, which crosses nothing), "host" (to another rank of the same host), "network" (to
    another host). All-to-alls count each part by where it goes; other collectives count what a rank must send at
    least, (W - 1) / W of the buffer for each of their phases, by the widest link of the group.
    """

    def __init__(self) -> None:
        self.bytes: Counter[tuple[str, str]] = Counter()

    def add(self, what: str, link: str, count: int) -> None:
        """Count some more."""
        self.bytes[what, link] += count


def all_to_all(parts: Sequence[Tensor], sizes: Sequence[int], group: dist.ProcessGroup | None) -> Pending[list[Tensor]]:
    """Part i [n_i] to member i of the group, from whom sizes[i] elements come back; all of one dtype."""
    if group is None:
        return Pending(lambda: list(parts))
    send = torch.cat(list(parts))
    receive = send.new_empty(sum(sizes))
    work = dist.all_to_all_single(receive, send, list(sizes), [part.numel() for part in parts], group, async_op=True)

    def finish() -> list[Tensor]:
        work.wait()
        _ = send  # must live until it is sent
        return list(receive.split(list(sizes)))

    return Pending(finish)
