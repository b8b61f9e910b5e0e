"""Sends bytes and tensors between ranks: begun now, awaited later, and counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


class Pending(Generic[T]):
    """Something that is under way. `wait` returns it, and may be called several times."""

    def __init__(self, finish: Callable[[], T]) -> None:
        self._finish: Callable[[], T] | None = finish
        self._value: T

    def wait(self) -> T:
        """Wait until it is there and return it."""
        if self._finish is not None:
            self._value = self._finish()
            self._finish = None
        return self._value


class Meter:
    """Bytes handed to collectives: (what for, kind of link) -> bytes.

    Links are "self" (a rank's own part, which is not sent), "host" (to another rank of the same
    host) and "network" (to another host). An all-to-all counts each part by where it goes. Other
    collectives count what a rank must send at least, (W - 1) / W of the buffer for each of their
    phases, as going over the widest link of the group.
    """

    def __init__(self) -> None:
        self.bytes: Counter[tuple[str, str]] = Counter()

    def add(self, purpose: str, link: str, count: int) -> None:
        """Add to the bytes of a purpose and a link."""
        self.bytes[purpose, link] += count


def all_to_all(
    send_N: Tensor,
    counts: Sequence[int],
    sizes: Sequence[int],
    group: dist.ProcessGroup | None,
    wait: Callable[[dist.Work, Tensor], None],
) -> Pending[Tensor]:
    """Send counts[i] elements to member i of the group, in order. Returns the sizes[i] elements of
    each, in order.

    wait: waits for a collective on a tensor.
    """
    if group is None:
        return Pending(lambda: send_N)
    receive_N = send_N.new_empty(sum(sizes))
    work = dist.all_to_all_single(
        receive_N, send_N, list(sizes), list(counts), group, async_op=True
    )

    def finish() -> Tensor:
        wait(work, receive_N)
        _ = send_N  # must live until it is sent
        return receive_N

    return Pending(finish)
