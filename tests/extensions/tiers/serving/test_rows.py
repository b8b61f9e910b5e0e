from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from sparrow.extensions.tiers.serving.blocks import open_blocks
from sparrow.extensions.tiers.serving.rows import CachedRows, read
from sparrow.kernels.row_cache import WAYS
from tests.kernels.cached_rows.test_cached_rows import LAYOUT, ROWS, fields

__all__ = ["fields"]  # a fixture


def cached(place: Path, fields: dict[str, Tensor], sets: int) -> CachedRows:
    blocks = open_blocks(place, LAYOUT, "t", fields, "auto")
    return CachedRows(blocks, "t", place, sets * WAYS * (LAYOUT.record_bytes + 8))


def got(rows: CachedRows, rows_N: Tensor) -> dict[str, Tensor]:
    (fields,) = read([(rows, rows_N)])
    return fields


def held(rows: CachedRows) -> set[int]:
    return set(rows.cache.rows_F.tolist()) - {-1}


@pytest.mark.parametrize("sets", [0, 3, 1000])
def test_rows_are_those_that_were_written(
    sets: int, tmp_path: Path, fields: dict[str, Tensor]
) -> None:
    rows, random = cached(tmp_path / "t", fields, sets), torch.Generator().manual_seed(sets)
    hits = 0
    for _ in range(30):
        rows_U = torch.randint(
            0, ROWS, (int(torch.randint(1, 400, (), generator=random)),), generator=random
        ).unique()
        hits += len(held(rows) & set(rows_U.tolist()))
        for name, of in got(rows, rows_U).items():
            assert of.equal(fields[name][rows_U])
        assert rows.counters["hits"] == hits
    assert len(held(rows)) <= max(1, min(sets, 94)) * WAYS and rows.counters["misses"] > 0
    assert rows.counters["reads"] > 0


def test_a_cache_is_warmed_with_as_many_as_it_has_frames(
    tmp_path: Path, fields: dict[str, Tensor]
) -> None:
    rows = cached(tmp_path / "t", fields, 1000)
    hot = torch.randperm(ROWS + 50)  # a list may be of a larger model
    rows.warm(hot[:900])
    assert held(rows) == {row for row in hot[:900].tolist() if row < ROWS}
    few = cached(tmp_path / "t", fields, 2)
    few.warm(hot)
    assert held(few) <= set(hot[:64].tolist())
