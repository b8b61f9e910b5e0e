from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sparrow.core import Batch
from sparrow.data.batches.dataset import Dataset
from sparrow.data.batches.loader import Loader, Share
from sparrow.distributed import World
from sparrow.trained.run import Run
from sparrow.training.dropout import Dropout


@dataclass
class _Step:
    """What a step trains on, the loader's position before it, and what a GPU does last to copy
    it.
    """

    shares: list[Share]
    position: dict[str, int]
    is_last: bool  # the epoch has no step left
    copied: torch.cuda.Event | None


class Feed:
    """This rank's shares of each step's batches, `accumulate` at a time, on a device.

    A step may look at those of the next. The position is that of what was handed out, not of what
    was looked at. A GPU copies batches beside what it computes, from pinned memory and on a stream
    of their own. drop: which known ids become unknown, see `Dropout`.

    loader: reads the batches.
    """

    def __init__(
        self, loader: Loader, accumulate: int, drop: Dropout, device: torch.device
    ) -> None:
        self.loader = loader
        self._accumulate = accumulate
        self._drop = drop
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._shares: Iterator[Share] | None = None
        self._queue: deque[_Step] = deque()

    def with_time(self) -> None:
        """Let batches have the time of their last row, from the first one on."""
        assert self._shares is None
        self.loader.with_time()

    def peek(self, steps: int = 0) -> list[Share]:
        """Returns what `take` will return, or what it will `steps` later. A GPU may still be
        copying it.

        It is empty at the end of an epoch. The next epoch is looked at only when this one has been
        taken.
        """
        while len(self._queue) <= steps:
            if self._queue and not self._queue[-1].shares:
                return []
            position = self.loader.state_dict()
            is_last = self.loader.exhausted
            self._shares = self.loader.shares() if self._shares is None else self._shares
            shares = [
                self._for_training(share)
                for share in itertools.islice(self._shares, self._accumulate)
            ]
            copied = self._stream.record_event() if self._stream else None
            self._queue.append(_Step(shares, position, is_last, copied))
        return self._queue[steps].shares

    def _for_training(self, share: Share) -> Share:
        """The share that the loader has just given, as it is trained on."""
        position = self.loader.state_dict()
        # all batches of a step agree, as one large batch would
        step = (position["batch"] - 1) // self._accumulate
        batch = self._drop(share.batch, position["epoch"], step)
        return replace(share, batch=self._sent(batch))

    def _sent(self, batch: Batch) -> Batch:
        """The batch, on its way to the device if that is a GPU."""
        if self._stream is None:
            return batch
        with torch.cuda.stream(self._stream):
            return batch.map_tensors(Tensor.pin_memory).to(self._device, non_blocking=True)

    def arrive(self) -> None:
        """Let whatever a GPU does from now on wait for what `take` will return. The host does not
        wait.
        """
        shares = self.peek()
        if (copied := self._queue[0].copied) is None:
            return
        current = torch.cuda.current_stream(self._device)
        current.wait_event(copied)
        for share in shares:
            share.batch.map_tensors(lambda t: _keep_for(t, current))

    def take(self) -> list[Share]:
        """Returns the next step's batches. It is empty at the end of an epoch, after which the next
        begins.
        """
        self.arrive()
        shares = self._queue.popleft().shares
        if not shares:
            self._shares = None
        return shares

    @property
    def exhausted(self) -> bool:
        """Whether the epoch has no step left."""
        return self._queue[0].is_last if self._queue else self.loader.exhausted

    def state_dict(self) -> dict[str, int]:
        """Returns the loader's position, from which the batches come that were not handed out."""
        return self._queue[0].position if self._queue else self.loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a position, before a batch was looked at."""
        self.loader.load_state_dict(state)


def read_share(
    run: Run, dataset: Dataset, world: World, split: str, *, shuffle: bool = False
) -> Loader:
    """Returns a loader of this rank's share of a part's batches."""
    settings = run.data
    return dataset.loader(
        settings.batch_size,
        split,
        shuffle,
        run.seed,
        settings.dedup,
        rank=world.rank,
        ranks=world.size,
    )


def _keep_for(t: Tensor, stream: torch.cuda.Stream) -> Tensor:
    """Keep the memory of a tensor that a stream uses, until it has done so."""
    t.record_stream(stream)
    return t
