from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest
import torch

from sparrow.core import UserError
from sparrow.embeddings import Component
from sparrow.embeddings.sizes import memory_bytes
from sparrow.embeddings.spec import in_memory
from sparrow.extensions.tiers import ssd
from sparrow.extensions.tiers.frames import tier_frames
from sparrow.extensions.tiers.tiering import Device, Use, cost, probe_disk, sizes, smallest
from sparrow.kernels.block_io import Layout
from tests.extensions.tiers.test_curves import curve_of, zipf_batches

DEVICE = Device(reads_per_s=10_000, bytes_per_s=4e8)


def use_of(
    skew: float, rows: int = 20_000, batches: int = 60, size: int = 500, *, is_whole: bool = False
) -> Use:
    curve = curve_of(zipf_batches(skew, rows, batches, size), window=5)
    return Use(
        component=Component(name="t", rows=rows, dim=16),
        curve=curve,
        lookups=size,
        is_whole=is_whole,
    )


def test_more_frames_cost_less_time() -> None:
    use = use_of(1.05)
    costs = [cost([use], ssd.Config(bytes=size), DEVICE) for size in sizes([use])]
    assert [c.bytes for c in costs] == sorted(c.bytes for c in costs)
    assert all(a.ms >= b.ms for a, b in itertools.pairwise(costs))
    assert costs[0].ms_disk > 1.5 * costs[len(costs) // 2].ms_disk
    assert costs[-1].ms_disk == 0  # a frame for each row
    assert costs[-1].miss_ratio == pytest.approx(use.curve.cold)


def test_bytes_are_those_that_preflight_counts() -> None:
    use = use_of(1.0)
    tier = ssd.Config(bytes=smallest([use]))
    component = dataclasses.replace(use.component, tier=tier)
    assert cost([use], tier, DEVICE).bytes == memory_bytes(component, component.rows, component.dim)
    assert cost([use], in_memory(), DEVICE).bytes == use.component.rows * use.component.bytes_row


@pytest.mark.parametrize("rows", [1, 31, 33, 1000, 100_000])
def test_the_smallest_holds_batches_under_way(rows: int) -> None:
    use = use_of(0.5, rows=rows)
    tier = ssd.Config(bytes=smallest([use]))
    frames, _ = tier_frames(dataclasses.replace(use.component, tier=tier), rows)
    assert frames >= min(use.curve.most, rows)
    last = dataclasses.replace(use.component, tier=ssd.Config(bytes=sizes([use])[-1]))
    assert tier_frames(last, rows)[0] >= rows


def test_batches_that_nobody_looked_at_have_room_for_more_rows() -> None:
    """Of a run of four times as many batches as were looked at, one lacked 3 frames of
    thousands.
    """
    looked, later = use_of(1.05, batches=20), use_of(1.05, batches=400)
    assert later.curve.most > looked.curve.most
    tier = ssd.Config(bytes=smallest([dataclasses.replace(looked, is_whole=False)]))
    frames, _ = tier_frames(dataclasses.replace(looked.component, tier=tier), looked.component.rows)
    assert frames >= later.curve.most


def test_uniform_ids_are_bound_by_reads() -> None:
    """A steady state of far more rows than blocks in the queue: I / (l m (1 + w)) and what is
    written.
    """
    rows, size, batches = 200_000, 1000, 400
    use = use_of(0.0, rows, batches, size)
    tier = ssd.Config(fraction=0.1)
    found = cost([use], tier, DEVICE)
    misses = found.miss_ratio * use.references
    assert found.miss_ratio == pytest.approx(1 - 0.1, abs=0.03)
    blocks = Layout(fields=use.component.fields, rows=rows).blocks
    # if no two rows shared a block
    most = 2 * misses / DEVICE.reads_per_s + misses * 4096 / DEVICE.bytes_per_s
    assert found.ms_disk / 1e3 < most
    assert found.ms_disk / 1e3 > (min(misses, blocks) / 3) / DEVICE.reads_per_s


def test_memory_alone_waits_for_no_disk() -> None:
    found = cost([use_of(1.0)], in_memory(), DEVICE)
    assert (found.ms_disk, found.miss_ratio) == (0.0, 0.0)
    assert found.ms_processor > 0


def test_a_faster_disk_takes_less_time() -> None:
    use, tier = use_of(0.8), ssd.Config(fraction=0.1)
    slow, fast = (
        cost([use], tier, Device(reads_per_s=n, bytes_per_s=1e12)).ms_disk for n in (1e4, 2e4)
    )
    assert slow == pytest.approx(2 * fast, rel=1e-4)


def test_a_table_that_nobody_looks_up() -> None:
    use = Use(
        component=Component(name="t", rows=100, dim=4),
        curve=curve_of([]),
        lookups=0.0,
        is_whole=True,
    )
    for tier in (in_memory(), ssd.Config(bytes=smallest([use]))):
        assert cost([use], tier, DEVICE).ms == 0.0


def test_components_of_a_table_have_frames_each() -> None:
    use = use_of(1.0)
    tier = ssd.Config(bytes=smallest([use]))
    one, two = cost([use], tier, DEVICE), cost([use, use], tier, DEVICE)
    assert (two.bytes, two.ms_disk) == (2 * one.bytes, pytest.approx(2 * one.ms_disk))
    assert two.miss_ratio == pytest.approx(one.miss_ratio)


def test_a_disk_is_measured(tmp_path: Path) -> None:
    found = probe_disk(tmp_path / "new")
    assert 100 < found.reads_per_s < 1e8
    assert found.bytes_per_s > 1e6
    assert list((tmp_path / "new").iterdir()) == []


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="name another folder"):
        probe_disk(tmp_path / "file" / "in")


@pytest.mark.parametrize(
    "name", ["reads_per_s", "bytes_per_s", "memory_bytes_per_s", "processor_s", "miss_s", "batch_s"]
)
def test_a_device_does_something(name: str) -> None:
    with pytest.raises(UserError, match=name):
        Device(**{name: 0.0})


def test_sizes_are_few_and_whole() -> None:
    found = sizes([use_of(1.0, rows=1_000_000)])
    assert 10 < len(found) < 100
    assert found == sorted(set(found))
    assert torch.tensor(found).diff().min() > 0
