"""What a step does of the next ones: batches are copied to a GPU, ids leave for their shards, rows
leave an SSD.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from typing_extensions import override

from sparrow.data.batches.loader import Share
from sparrow.embeddings import EmbeddingTables
from sparrow.trained.run import Run
from sparrow.training.callbacks import Callback
from sparrow.training.feed import Feed


class LookAhead(Callback):
    """Looks at coming batches. All ranks look at as many.

    Args:
        run: its settings.
        feed: the batches.
        tables: the model's.
        ranks: how many there are.
        steps: how many the run has.
        ahead: for how many coming steps rows are looked up before they are needed.
    """

    def __init__(
        self,
        run: Run,
        feed: Feed,
        tables: Sequence[EmbeddingTables],
        ranks: int,
        steps: int,
        ahead: int,
    ) -> None:
        self._feed = feed
        self._tables = tables
        self._steps = steps
        self._is_gpu = torch.device(run.device).type == "cuda"
        self._many = ranks > 1
        self._depth = max(int(self._many), ahead)

    @override
    def look_ahead(self, step: int, waiting: Sequence[Share]) -> None:
        """Looks at the steps after this one. The batches that wait for it come first.

        Ids leave from the GPU. So where they are sent, batches are copied a step before.
        """
        if step + 1 >= self._steps or not (self._depth or self._is_gpu):
            return
        steps_left = self._steps - (step + 1)
        coming = [self._feed.peek(n) for n in range(min(max(self._depth, 1), steps_left))]
        if self._many:
            self._feed.arrive()
        if self._depth:
            for share, tables in itertools.product(
                [*waiting, *itertools.chain.from_iterable(coming)], self._tables
            ):
                tables.prefetch(share.batch.ids)
        if self._many and self._is_gpu:
            self._feed.peek(1)
