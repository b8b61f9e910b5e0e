"""Exact rows above rows in fewer bits: on an SSD, or in frames of a device, all is as with the
latter in memory.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from sparrow.core import UserError
from sparrow.embeddings import EmbeddingTables
from sparrow.embeddings.sizes import memory_bytes
from sparrow.embeddings.spec import Cache
from sparrow.extensions.tiers import ssd
from sparrow.extensions.tiers.frames import tier_frames
from sparrow.extensions.tiers.stores.cached import CachedStore, ssd_of
from sparrow.extensions.tiers.stores.ssd import SsdStore, queue_bytes
from sparrow.kernels.formats import RowFormat, bf16, int4, int8, mxfp4
from sparrow.kernels.row_cache.policies import lfu
from sparrow.kernels.rules import adam
from tests.extensions.tiers.stores.test_ssd import (
    DIM,
    ROWS,
    assert_equal,
    backward,
    batch,
    carry,
    evaluated,
    forward,
    learn_nothing_at_times,
    step,
    tables_of,
)

SMALL = ssd.Config(fraction=0.25)
FORMATS: dict[str, RowFormat] = {
    "int8": int8.Config(),
    "int4": int4.Config(),
    "mxfp4": mxfp4.Config(),
    "bf16": bf16.Config(),
}
CACHES: dict[str, Cache] = {
    "lru": Cache(fraction=0.06),
    "lfu": Cache(fraction=0.128, policy="lfu"),
    "protect 1": Cache(fraction=0.06, protect=1),
    "all": Cache(fraction=1.0),
}


def stores_of(tables: EmbeddingTables) -> tuple[CachedStore, SsdStore]:
    above = tables.record("t").store
    beneath = ssd_of(above)
    assert isinstance(above, CachedStore) and beneath is not None and beneath is not above
    return above, beneath


ALL = [
    (format, cache, mode)
    for format in FORMATS
    for cache in CACHES
    for mode in ("fused", "deferred")
]
QUICK = [("int8", "lru", "fused"), ("bf16", "lfu", "deferred"), ("int4", "protect 1", "deferred")]
QUICK += [("int8", "all", "deferred"), ("mxfp4", "lru", "deferred")]


@pytest.mark.parametrize(
    ("format", "cache", "mode"),
    [of if of in QUICK else pytest.param(*of, marks=pytest.mark.slow) for of in ALL],
)
def test_the_bits_are_those_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str, cache: str, mode: str
) -> None:
    """At each depth, with evaluations and steps that are left out: outputs, rows, frames and who
    has them.
    """
    brought = counted(monkeypatch)
    make: Any = partial(
        tables_of, format=FORMATS[format], cache=CACHES[cache], mode=mode, state="bf16", window=5
    )
    plain, made, batches = (
        make(),
        [make(tmp_path, SMALL) for _ in range(5)],
        [batch(seed) for seed in range(60)],
    )
    made += [make(tier=SMALL, host=True), make(tmp_path, SMALL, host=True)]
    for n, ids in enumerate(batches):
        seen = []
        for depth, tables in [(0, plain), *enumerate(made)]:
            out = forward(tables, ids)
            for later in batches[n + 1 : n + 1 + min(depth, 4)]:
                tables.prefetch(later)
            seen.append(torch.cat([out, evaluated(tables, n)]) if n % 7 == 3 else out.detach())
            assert torch.equal(seen[0], seen[-1])
            backward(out, n)
            if n % 5 == 3:
                tables.discard()
            tables.update()
    for tables in made:
        assert_equal(plain, tables)
        above, beneath = stores_of(tables)
        assert above.hits > 50 and beneath.left > 5
        if cache != "all":
            assert int(tables.record("t").fields["touched"].sum()) > 50  # rows that left, rounded
    assert bool(brought) == (cache != "all")


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows had lost their frames between `fetch` and lookup, each time."""
    brought: list[int] = []
    bring = SsdStore.bring

    def noted(self: SsdStore, rows_U: torch.Tensor, number: int) -> None:
        brought.append(len(rows_U))
        bring(self, rows_U, number)

    monkeypatch.setattr(SsdStore, "bring", noted)
    return brought


def test_batches_add_up_before_an_update(tmp_path: Path) -> None:
    """A row may be out in one batch and in a frame in the next, before it learns from both."""
    make: Any = partial(
        tables_of,
        format=int8.Config(),
        cache=Cache(fraction=0.06),
        mode="deferred",
        of=adam.Config(),
    )
    made = [make(), make(tmp_path, ssd.Config(fraction=0.4), window=9)]
    batches = [batch(seed) for seed in range(95)]
    for seed in range(0, 90, 3):
        for tables in made:
            for number in range(3):
                for later in range(number, 5):
                    tables.prefetch(batches[seed + later])
                backward(forward(tables, batches[seed + number]), seed)
            tables.update()
    assert_equal(*made)
    assert stores_of(made[1])[1].left > 50


@pytest.mark.parametrize("to_ssd", [True, False])
def test_chunks_carry_every_bit_from_tier_to_tier(tmp_path: Path, to_ssd: bool) -> None:
    """The frames as they are, not rounded; what was in others is forgotten."""
    make: Any = partial(tables_of, format=int4.Config(), cache=Cache(fraction=0.06, policy="lfu"))
    one, other = make(*[tmp_path] * (not to_ssd)), make(*[tmp_path] * to_ssd)
    carry(one, other)


def test_a_batch_that_was_given_up_changes_nothing(tmp_path: Path) -> None:
    make: Any = partial(tables_of, format=bf16.Config(), cache=Cache(fraction=0.06))
    plain, tables = make(), make(tmp_path, SMALL)
    for seed in range(40):
        handle = tables.prepare(batch(1000 + seed))
        tables.exchange.prefetch(handle.inner)
        tables.release(handle)
        assert torch.equal(step(plain, seed), step(tables, seed))
    assert_equal(plain, tables)
    assert len(stores_of(tables)[0]._above) <= 1


def test_gradients_that_are_not_finite_leave_rows_as_in_memory(tmp_path: Path) -> None:
    make: Any = partial(tables_of, format=int8.Config(), cache=Cache(fraction=0.06))
    made = [make(), make(tmp_path, SMALL)]
    learn_nothing_at_times(made)
    assert_equal(*made)


def test_a_row_is_read_once_while_it_has_an_exact_frame(tmp_path: Path) -> None:
    """What is above is not asked of the SSD, and does not take frames there."""
    tables = tables_of(tmp_path, SMALL, format=int8.Config(), cache=Cache(fraction=1.0))
    above, beneath = stores_of(tables)
    for _ in range(30):
        step(tables, 0)
    assert above.hits > 29 / 30 * above.used - 1
    assert beneath.used == above.used - above.hits


@pytest.mark.parametrize("depth", [0, 4])
def test_beneath_them_a_batch_counts_its_rows_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    """When it is looked at ahead, in whatever frames they are. Rows that lose their exact frames
    then count nothing.
    """
    monkeypatch.setattr(lfu.Config, "halved", 20)
    brought, fetch = counted(monkeypatch), SsdStore.fetch
    want_R = torch.zeros(ROWS, dtype=torch.uint8)

    def noted(self: SsdStore, rows_N: torch.Tensor, number: int, settled: int) -> None:
        want_R.bitwise_right_shift_(int(number % 20 == 0))
        want_R[rows_N.long().unique()] += 1
        fetch(self, rows_N, number, settled)

    monkeypatch.setattr(SsdStore, "fetch", noted)
    counting = ssd.Config(fraction=0.4, policy="lfu")
    tables = tables_of(
        tmp_path, counting, format=int8.Config(), cache=Cache(fraction=0.06), window=5
    )
    batches = [batch(seed) for seed in range(60)]
    for n, ids in enumerate(batches):
        out = forward(tables, ids)
        for later in batches[n + 1 : n + 1 + depth]:
            tables.prefetch(later)
        backward(out, n)
        tables.update()
    assert torch.equal(stores_of(tables)[1].get_buffer("counts"), want_R) and int(want_R.max()) > 1
    assert bool(brought) == (depth > 0)


def test_memory_is_what_is_allocated(tmp_path: Path) -> None:
    for cache, tier in (
        (CACHES["lru"], SMALL),
        (CACHES["lfu"], ssd.Config(bytes=15_000, policy="lfu")),
    ):
        tables = tables_of(tmp_path, tier, format=int8.Config(), cache=cache)
        component, (_, beneath) = tables.record("t").component, stores_of(tables)
        beside = memory_bytes(component, ROWS, DIM) - tables.record("t").nbytes
        spare = tier_frames(component, ROWS)[1]
        assert (
            beside == spare * 4 + queue_bytes(component, ROWS) + 12 * beneath._blocks.layout.blocks
        )


def test_too_few_frames_beneath_are_refused_and_the_table_stays_whole(tmp_path: Path) -> None:
    make: Any = partial(tables_of, format=int8.Config(), cache=Cache(fraction=0.06))
    plain, tables = make(), make(tmp_path)
    for seed in range(5):
        assert torch.equal(step(plain, seed), step(tables, seed))
    with pytest.raises(
        UserError, match=r"'t': \d+ rows of a batch find no frame, .*; raise tables.tier.fraction"
    ):
        tables(batch(7, 200))
    assert_equal(plain, tables)
    for seed in range(5, 30):
        assert torch.equal(step(plain, seed), step(tables, seed))
