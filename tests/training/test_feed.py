"""Looking ahead changes neither the batches nor the position that a checkpoint saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sparrow import data
from sparrow.data.batches.dataset import Dataset
from sparrow.training.dropout import Dropout
from sparrow.training.feed import Feed

BATCH = 100


def feed_of(dataset: Dataset, accumulate: int, start: dict[str, int] | None = None) -> Feed:
    loader = dataset.loader(BATCH, "train", shuffle=True, seed=1)
    if start:
        loader.load_state_dict(start)
    return Feed(loader, accumulate, Dropout(dataset.schema, {}, 0), torch.device("cpu"))


def steps(feed: Feed, looks: int | None, epochs: int = 2) -> list[tuple[Any, ...]]:
    """What each step takes, whether it was the epoch's last, and the position after it."""
    found: list[tuple[Any, ...]] = []
    for _ in range(epochs):
        while shares := feed.take():
            if looks is not None:
                seen = [feed.peek(n) for n in range(looks + 1)]
                assert [[id(s) for s in feed.peek(n)] for n in range(looks + 1)] == [
                    [id(s) for s in x] for x in seen
                ]
            labels = [share.batch.labels_BT.flatten().tolist() for share in shares]
            found.append((labels, feed.exhausted, feed.state_dict()))
    return found


@pytest.mark.parametrize("accumulate", [1, 3])
def test_looking_ahead_changes_nothing(prepared: Path, accumulate: int) -> None:
    dataset = data.open(prepared)
    plain = steps(feed_of(dataset, accumulate), None)
    assert sum(exhausted for _, exhausted, _ in plain) == 2 and len(plain) > 6
    for looks in (0, 1, 5):
        assert steps(feed_of(dataset, accumulate), looks) == plain


def test_a_feed_goes_on_where_it_handed_out_last(prepared: Path) -> None:
    dataset = data.open(prepared)
    plain, feed = steps(feed_of(dataset, 1), None, epochs=1), feed_of(dataset, 1)
    for _ in range(3):
        feed.take()
        feed.peek(4)
    assert steps(feed_of(dataset, 1, feed.state_dict()), None, epochs=1) == plain[3:]
