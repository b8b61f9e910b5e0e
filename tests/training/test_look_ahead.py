from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sparrow import data
from sparrow.embeddings import TableChoices
from sparrow.embeddings.spec import TIERS
from sparrow.trained.build import build, tables_of
from sparrow.trained.run import Loop
from sparrow.training.dropout import Dropout
from sparrow.training.feed import Feed
from sparrow.training.look_ahead import LookAhead
from tests.runs import on_disk, small_run


@pytest.mark.parametrize(
    ("tier", "ahead", "ranks"), [("memory", 2, 1), ("ssd", 0, 1), ("ssd", 2, 1), ("ssd", 3, 2)]
)
def test_rows_of_coming_steps_are_asked_for_once_and_in_order(
    prepared: Path, tmp_path: Path, tier: Any, ahead: int, ranks: int
) -> None:
    """None beyond the last step; in memory nothing is asked for."""
    choices = TableChoices(tier=TIERS.config(tier)(fraction=1.0))
    loop = Loop(accumulate=2)
    run = on_disk(small_run(prepared, tmp_path, tables=choices, loop=loop), tmp_path)
    dataset = data.open(prepared)
    (tables,) = tables_of(build(run, dataset.schema))
    feed = Feed(dataset.loader(50), 2, Dropout(dataset.schema, {}, 0), torch.device("cpu"))
    asked: list[Any] = []
    find = tables.prepare
    tables.prepare = lambda ids: (asked.append(ids), find(ids))[1]  # type: ignore[func-returns-value, method-assign]
    look = LookAhead(run, feed, [tables], ranks, 6, ahead * (tier == "ssd"))
    taken = []
    for step in range(6):
        taken += (shares := feed.take())
        look.look_ahead(step, shares[-1:])
        depth = max(ahead * (tier == "ssd"), ranks - 1)
        assert len(asked) == (1 + 2 * (min(depth, 5 - step) + step) if depth else 0)
    assert [id(ids) for ids in asked] == [id(share.batch.ids) for share in taken[1:]][: len(asked)]
