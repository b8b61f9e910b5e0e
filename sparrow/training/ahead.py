"""What a step does of the next ones: batches are copied to a GPU, ids leave for their shards, rows leave an SSD."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from sparrow.data.batches.loader import Share
from sparrow.embeddings import EmbeddingTables
from sparrow.trained.run import Run
from sparrow.training.feed import Feed


class Ahead:
    """Looks at coming batches. All ranks look at as many.

    Args:
        run: its settings.
        feed: the batches.
        tables: the model's.
        ranks: how many there are.
        steps: how many the run has.
    """

    def __init__(self, run: Run, feed: Feed, tables: Sequence[EmbeddingTables], ranks: int, steps: int) -> None:
        self._feed = feed
        self._tables = tables
        self._steps = steps
        self._is_gpu = torch.device(run.device).type == "cuda"
        components = [component for of in tables for spec in of.specs for component in spec.components]
        has_frames = any(component.tier.is_on for component in components) and not run.compile
        self._many = ranks > 1
        self._depth = max(int(self._many), run.loop.ahead * has_frames)

    def __call__(self, step: int, now: Sequence[Share]) -> None:
        """Look at the steps after this one. now: batches of this one that nobody has looked up, which come first.

        Ids leave from the GPU. So where they are sent, batches are copied a step before.
        """
        if step + 1 >= self._steps or not (self._depth or self._is_gpu):
            return
        coming = [self._feed.peek(n) for n in range(max(self._depth, 1)) if step + 1 + n < self._steps]
        if self._many:
            self._feed.arrive()
        if self._depth:
            for share, tables in itertools.product([*now, *itertools.chain.from_iterable(coming)], self._tables):
                tables.prefetch(share.batch.ids)
        if self._many and self._is_gpu:
            self._feed.peek(1)
