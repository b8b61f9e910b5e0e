from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sparrow.extensions.tiers.curves import Curve, Trace, larger_before


def zipf_batches(skew: float, rows: int, batches: int, size: int, seed: int = 0) -> list[Tensor]:
    """Batches of ids whose popularity falls with their rank. Rows are scattered."""
    g = torch.Generator().manual_seed(seed)
    weights = torch.arange(1, rows + 1, dtype=torch.float64) ** -skew
    cumulative = weights.cumsum(0) / weights.sum()
    scattered = torch.randperm(rows, generator=g)
    draws = [torch.rand(size, generator=g, dtype=torch.float64) for _ in range(batches)]
    return [scattered[torch.searchsorted(cumulative, d).clamp(max=rows - 1)] for d in draws]


def lru_miss_ratio(batches: list[Tensor], frames: int, after: int = 0) -> float:
    """An LRU cache, batch by batch: rows of a batch that are in are hits; then those used longest
    ago leave.
    """
    last: dict[int, tuple[int, int]] = {}
    misses = references = 0
    for number, rows in enumerate(batches):
        mine = rows.unique().tolist()
        references += len(mine) * (number >= after)
        misses += sum(row not in last for row in mine) * (number >= after)
        last |= {row: (number, row) for row in mine}
        last = dict(sorted(last.items(), key=lambda item: item[1])[-frames:])
    return misses / references


def curve_of(batches: list[Tensor], **settings: int) -> Curve:
    trace = Trace(**settings)
    for rows in batches:
        trace.add(rows)
    return trace.curve()


@pytest.mark.parametrize("count", [0, 1, 2, 3, 64, 65, 500])
def test_larger_before(count: int) -> None:
    ranks = torch.randperm(count, generator=torch.Generator().manual_seed(count))
    expected = [int((ranks[:n] > ranks[n]).sum()) for n in range(count)]
    assert larger_before(ranks).tolist() == expected


@pytest.mark.parametrize("frames", [32, 100, 400, 1000, 3000])
def test_a_whole_trace_is_exact(frames: int) -> None:
    batches = zipf_batches(1.05, 4000, 60, 300)
    assert curve_of(batches).miss_ratio(frames) == pytest.approx(
        lru_miss_ratio(batches, frames), abs=1e-9
    )


@pytest.mark.parametrize("after", [0, 1, 30])
def test_first_batches_only_fill(after: int) -> None:
    batches = zipf_batches(1.05, 4000, 60, 300)
    trace = Trace()
    for rows in batches:
        trace.add(rows)
    curve = trace.curve(after)
    assert curve.batches == 60 - after
    for frames in (100, 1000):
        assert curve.miss_ratio(frames) == pytest.approx(
            lru_miss_ratio(batches, frames, after), abs=1e-9
        )


@pytest.mark.parametrize("skew", [0.0, 0.8, 1.05, 1.3])
def test_a_sample_is_near(skew: float) -> None:
    batches = zipf_batches(skew, 40_000, 150, 2000)
    trace = Trace(keep=1 << 14)
    for rows in batches:
        trace.add(rows)
    assert trace.share < 0.5  # or nothing is shown
    curve, whole = trace.curve(), curve_of(batches, keep=1 << 30)
    for frames in (500, 2000, 5000, 10_000, 30_000):
        assert curve.miss_ratio(frames) == pytest.approx(whole.miss_ratio(frames), abs=0.02)
    assert whole.miss_ratio(5000) == pytest.approx(lru_miss_ratio(batches, 5000), abs=1e-9)


def test_uniform_ids_miss_as_often_as_rows_are_out() -> None:
    batches = zipf_batches(0.0, 10_000, 400, 1000)
    miss = curve_of(batches).miss_ratio(5000)
    assert miss == pytest.approx(0.5, abs=0.03)


def test_rows_seen_first_always_miss() -> None:
    batches = [torch.arange(100 * n, 100 * n + 100) for n in range(20)]
    assert curve_of(batches).miss_ratio(1 << 40) == 1.0


def test_no_batches_no_rows() -> None:
    assert curve_of([]).miss_ratio(10) == 1.0
    assert curve_of([torch.zeros(0, dtype=torch.int64)] * 3).references == 0


def test_rows_of_consecutive_batches() -> None:
    batches = [torch.arange(50)] * 3 + [torch.arange(40 * n, 40 * n + 40) for n in range(6)]
    alone = curve_of(batches, window=1)
    assert alone.most == 50
    together = curve_of(batches, window=3)
    exact = max(len(torch.cat(batches[n : n + 3]).unique()) for n in range(7))
    assert 0.6 * exact <= together.most <= exact


def test_the_same_batches_give_the_same() -> None:
    batches = zipf_batches(1.0, 5000, 50, 500)
    first, second = (curve_of(batches, keep=2000) for _ in range(2))
    assert torch.equal(first.distances_N, second.distances_N)
    mixed = [rows[torch.randperm(len(rows))] for rows in batches]
    assert torch.equal(first.distances_N, curve_of(mixed, keep=2000).distances_N)
