from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sparrow.kernels.block_io import Layout
from sparrow.kernels.formats import Field
from sparrow.kernels.row_cache import WAYS
from sparrow.serving.ssd import rows as module
from sparrow.serving.ssd.blocks import opened
from sparrow.serving.ssd.rows import CachedRows

ROWS = 3000
LAYOUT = Layout(fields={"weight": Field(width=5, across="cut"), "low": Field(dtype=torch.uint8)}, rows=ROWS)


@pytest.fixture(scope="module")
def fields() -> dict[str, Tensor]:
    """Of 3,000 rows, of which half are zeros: whole blocks of them, and rows among others."""
    found = {"weight": torch.randn(ROWS, 5), "low": torch.randint(1, 255, (ROWS,), dtype=torch.uint8)}
    for of in found.values():
        of[500:1700] = 0
        of[2000::3] = 0
    return found


def cached(place: Path, fields: dict[str, Tensor], sets: int) -> CachedRows:
    blocks = opened(place, LAYOUT, "t", fields, "auto")
    return CachedRows(blocks, "t", place, sets * WAYS * (LAYOUT.record_bytes + 8))


def got(rows: CachedRows, rows_U: Tensor) -> dict[str, Tensor]:
    rows.end(fetch := rows.begin(rows_U))
    return fetch.fields


def held(rows: CachedRows) -> set[int]:
    return set(rows.frames.tags_F.tolist()) - {-1}


@pytest.mark.parametrize("sets", [0, 3, 1000])
def test_rows_are_those_that_were_written(sets: int, tmp_path: Path, fields: dict[str, Tensor]) -> None:
    rows, random = cached(tmp_path / "t", fields, sets), torch.Generator().manual_seed(sets)
    hits = 0
    for _ in range(30):
        rows_U = torch.randint(0, ROWS, (int(torch.randint(1, 400, (), generator=random)),), generator=random).unique()
        hits += len(held(rows) & set(rows_U.tolist()))
        for name, of in got(rows, rows_U).items():
            assert of.equal(fields[name][rows_U])
        assert rows.hits == hits
    assert len(held(rows)) <= max(1, min(sets, 94)) * WAYS and rows.misses > 0
    assert rows.counters["reads"] > 0


def test_the_least_recently_used_gives_way(tmp_path: Path, fields: dict[str, Tensor]) -> None:
    rows = cached(tmp_path / "t", fields, 1)
    got(rows, torch.arange(32))
    got(rows, torch.arange(16))
    got(rows, torch.arange(100, 116))
    assert held(rows) == {*range(16), *range(100, 116)}


def test_a_request_keeps_its_rows_when_another_takes_their_frames(tmp_path: Path, fields: dict[str, Tensor]) -> None:
    rows = cached(tmp_path / "t", fields, 1)
    got(rows, torch.arange(32))
    one, other = rows.begin(torch.arange(32)), rows.begin(torch.arange(40, 72))
    rows.end(other)
    rows.end(one)
    assert one.fields["weight"].equal(fields["weight"][:32])
    assert other.fields["weight"].equal(fields["weight"][40:72])


def test_a_cache_is_warmed_with_as_many_as_it_has_frames(tmp_path: Path, fields: dict[str, Tensor]) -> None:
    rows = cached(tmp_path / "t", fields, 1000)
    hot = torch.randperm(ROWS + 50)  # a list may be of a larger model
    rows.warm(hot[:900])
    assert held(rows) == {row for row in hot[:900].tolist() if row < ROWS}
    few = cached(tmp_path / "t", fields, 2)
    few.warm(hot)
    assert held(few) <= set(hot[:64].tolist())


def test_numbers_of_batches_begin_again(tmp_path: Path, fields: dict[str, Tensor], monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "_LAST", 3)
    rows = cached(tmp_path / "t", fields, 1)
    for first in range(0, 700, 50):
        assert got(rows, torch.arange(first, first + 40))["weight"].equal(fields["weight"][first : first + 40])
    assert int(rows.frames.stamps_F.max()) <= 3
