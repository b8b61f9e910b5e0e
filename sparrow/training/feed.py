from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from sparrow.core import Batch
from sparrow.data.loader import Loader


@dataclass(frozen=True, eq=False)
class Portion:
    """A batch, and this rank's samples of it on its device."""

    whole: Batch
    mine: Batch


class Feed:
    """The batches of each step, `accumulate` at a time; a step may look at those of the next.

    share: what this rank computes of a batch. The position is that of what was handed out, not of what was looked at.
    """

    def __init__(self, loader: Loader, accumulate: int, share: Callable[[Batch], Portion]) -> None:
        self._loader, self._accumulate, self._share = loader, accumulate, share
        self._batches: Iterator[Batch] | None = None
        self._ahead: tuple[list[Portion], dict[str, int], bool] | None = None

    def peek(self) -> list[Portion]:
        """What `take` will give; empty at the end of an epoch."""
        if self._ahead is None:
            position = self._loader.state_dict(), self._loader.exhausted
            self._batches = iter(self._loader) if self._batches is None else self._batches
            self._ahead = [self._share(b) for b in itertools.islice(self._batches, self._accumulate)], *position
        return self._ahead[0]

    def take(self) -> list[Portion]:
        """The next step's batches; empty at the end of an epoch, behind which the next begins."""
        found, self._ahead = self.peek(), None
        if not found:
            self._batches = None
        return found

    @property
    def exhausted(self) -> bool:
        """Whether the epoch has no step left."""
        return self._loader.exhausted if self._ahead is None else self._ahead[2]

    def state_dict(self) -> dict[str, int]:
        """The loader's position; behind it comes what was not handed out."""
        return self._loader.state_dict() if self._ahead is None else self._ahead[1]
