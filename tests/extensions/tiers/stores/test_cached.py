"""Rows in few bits under fp32 frames: what the frames change, and what must not change them."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from sparrow.core import KeyedJagged, UserError
from sparrow.embeddings import Component, Direct, EmbeddingTables, Feature, TableSpec, moved_rows
from sparrow.embeddings.records import RowRecords
from sparrow.embeddings.sizes import memory_bytes
from sparrow.embeddings.spec import Cache
from sparrow.extensions.tiers.frames import exact_bytes, exact_frames
from sparrow.extensions.tiers.stores.cached import CachedStore
from sparrow.kernels import Impl
from sparrow.kernels.formats import (
    RowFormat,
    bf16,
    fp16,
    fp32,
    int4,
    int8,
    mxfp4,
    mxfp8,
    split_bf16,
)
from sparrow.kernels.row_cache.policies import POLICIES
from sparrow.kernels.rules import RowRule, adagrad, rowwise_adagrad, sgd
from tests.kernels.embedding_bag.cases import built, interpreted

ROWS, DIM = 500, 12
IMPLS: list[Any] = ["reference", pytest.param("cpp", marks=built)]
FORMATS: dict[str, RowFormat] = {
    "fp16": fp16.Config(),
    "bf16": bf16.Config(),
    "split_bf16": split_bf16.Config(),
    "int8": int8.Config(),
    "int4": int4.Config(),
    "mxfp8": mxfp8.Config(),
    "mxfp4": mxfp4.Config(),
}
LRU, LFU = (Cache(fraction=0.128, policy=p) for p in ("lru", "lfu"))  # two sets


def tables_of(
    format: RowFormat,
    cache: Cache,
    *,
    mode: str = "fused",
    of: RowRule | None = None,
    impl: Impl = "auto",
    state: str = "fp32",
) -> EmbeddingTables:
    spec = TableSpec(
        name="t",
        dim=DIM,
        addressing=Direct(ROWS),
        format=format,
        cache=cache,
        rule=of or sgd.Config(lr=0.5),
        state=state,
        init_scale=1.0,
    )  # type: ignore[arg-type]
    features = [Feature(name="a", table="t"), Feature(name="b", table="t", pooling="mean")]
    return EmbeddingTables([spec], features, seed=1, mode=mode, impl=impl)  # type: ignore[arg-type]


def batch(seed: int, count: int = 40) -> KeyedJagged:
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (2 * count,), generator=g)
    ids_N = (torch.rand(int(lengths.sum()), generator=g) ** 3 * ROWS).long()
    return KeyedJagged(keys=("a", "b"), values_N=ids_N, lengths=lengths)


def step(tables: EmbeddingTables, seed: int) -> torch.Tensor:
    ids = batch(seed)
    found = tables(ids)
    out = torch.cat([found["a"], found["b"]], 1)  # type: ignore[list-item]
    up = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed))
    (out * up).sum().backward()
    tables.update()
    return out.detach().clone()


def store_of(tables: EmbeddingTables) -> CachedStore:
    store = tables.record("t").store
    assert isinstance(store, CachedStore)
    return store


def content(tables: EmbeddingTables) -> dict[str, torch.Tensor]:
    """Everything, by row: beneath, and of the frames in the order of rows."""
    frames = store_of(tables).exact_rows()
    order = frames["row"].argsort()
    of_frames = {n: t if n in ("batch", "counts") else t[order] for n, t in frames.items()}
    return {**tables.record("t").fields, **{f"frames' {name}": t for name, t in of_frames.items()}}


def assert_equal(one: EmbeddingTables, other: EmbeddingTables) -> None:
    mine, its = content(one), content(other)
    assert mine.keys() == its.keys()
    for name in mine:
        assert torch.equal(mine[name], its[name]), name


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("policy", POLICIES.names())
@pytest.mark.parametrize("name", FORMATS)
def test_a_frame_for_each_row_is_fp32_begun_at_the_decoded_rows(
    name: str, policy: Any, impl: Impl
) -> None:
    cached = tables_of(
        FORMATS[name], Cache(fraction=1.0, policy=policy), of=adagrad.Config(lr=0.1), impl=impl
    )
    plain = tables_of(fp32.Config(), Cache(), of=adagrad.Config(lr=0.1), impl=impl)
    record = cached.record("t")
    plain.record("t").store.write(
        slice(0, ROWS), {"weight": FORMATS[name].exact(record.fields, DIM)}
    )
    for seed in range(12):
        one, other = step(cached, seed), step(plain, seed)
        # whose lookups read less than the rule does, where a row is not in a frame
        if name != "split_bf16":
            assert torch.equal(one, other)
    slots = store_of(cached).slots_of(torch.arange(ROWS))
    is_in = slots < len(store_of(cached).frame("tag"))
    assert 0.3 < is_in.double().mean() <= 1
    assert torch.equal(cached.record("t").weight[is_in], plain.record("t").weight[is_in])
    exact = FORMATS[name].exact(record.fields, DIM)
    assert torch.equal(exact[~is_in], plain.record("t").weight[~is_in])


FAST = [
    pytest.param("cpp", marks=built),
    pytest.param("triton", marks=[interpreted, pytest.mark.slow]),
]


@pytest.mark.parametrize("impl", FAST)
@pytest.mark.parametrize("cache", [LRU, LFU, Cache(bytes=2 * 32 * 65)])
@pytest.mark.parametrize("name", FORMATS)
def test_all_kernels_and_modes_have_the_same_bits(name: str, cache: Cache, impl: Any) -> None:
    made = [
        tables_of(FORMATS[name], cache, mode=m, impl=i)
        for m, i in itertools.product(("fused", "deferred"), (impl, "reference"))
    ]  # type: ignore[arg-type]
    for seed in range(25):
        first, *others = [step(tables, seed) for tables in made]
        assert all(torch.equal(first, other) for other in others)
    for other in made[1:]:
        assert_equal(made[0], other)
    assert store_of(made[0]).hits > 100


@pytest.mark.parametrize("state", ["fp32", "bf16"])
@pytest.mark.parametrize("name", FORMATS)
def test_a_row_that_leaves_is_rounded_with_its_last_update(name: str, state: str) -> None:
    """Whenever it leaves: the bits beneath are those of an update that stored the row at once."""
    cached = tables_of(FORMATS[name], Cache(fraction=0.05), state=state, of=adagrad.Config(lr=0.1))
    record = cached.record("t")
    only = torch.arange(8)
    for n in range(3):  # rows 0 to 7 are in a frame, and learn
        ids = KeyedJagged(
            keys=("a", "b"), values_N=only.repeat(2), lengths=torch.ones(16, dtype=torch.int64)
        )
        out = cached(ids)
        (out["a"] * (n + 1.5)).sum().backward()  # type: ignore[operator]
    frames = store_of(cached).exact_rows()
    assert sorted(frames["row"].tolist()) == only.tolist()
    order = frames["row"].argsort()
    exact = {n: t[order] for n, t in frames.items() if n not in ("batch", "counts")}
    assert exact["changed"].tolist() == [3] * 8
    expected = moved_rows.convert(
        record, exact, record.component.in_frames, only, (0, DIM), torch.full((8,), 3)
    )
    for seed in range(100, 160):  # others push them out
        ids = batch(seed)
        cached(replace(ids, values_N=ids.values_N % (ROWS - 8) + 8))
        cached.discard()
    slots = store_of(cached).slots_of(only)
    assert bool((slots >= len(store_of(cached).frame("tag"))).all())
    for field, tensor in record.fields.items():
        assert torch.equal(tensor[:8], expected[field]), field


def test_clean_rows_that_leave_are_not_written() -> None:
    cached = tables_of(int4.Config(), Cache(fraction=0.05))
    before = {name: tensor.clone() for name, tensor in cached.record("t").fields.items()}
    for seed in range(60):
        cached(batch(seed))
        cached.discard()
    assert store_of(cached).used - store_of(cached).hits > 500
    for name, tensor in cached.record("t").fields.items():
        assert torch.equal(tensor, before[name]), name


def test_evaluation_reads_frames_and_changes_nothing() -> None:
    cached = tables_of(int8.Config(), LFU)
    for seed in range(10):
        step(cached, seed)
    before = {name: tensor.clone() for name, tensor in content(cached).items()}
    used = store_of(cached).used
    cached.eval()
    for seed in range(20, 30):
        found = cached(batch(seed))["a"].detach()
        ids = batch(seed)["a"]
        bag_N = torch.arange(len(ids.lengths_B)).repeat_interleave(ids.lengths_B)
        expected = torch.zeros(len(ids.lengths_B), DIM).index_add_(
            0, bag_N, cached.record("t").weight[ids.values_N]
        )
        torch.testing.assert_close(found, expected)
    cached.train()
    assert store_of(cached).used == used
    for name, tensor in content(cached).items():
        assert torch.equal(tensor, before[name]), name
    cached.mode = "off"
    cached(batch(3))
    assert store_of(cached).used == used


@pytest.mark.parametrize("cache", [LRU, LFU])
def test_looking_ahead_changes_no_bit(cache: Cache) -> None:
    plain, ahead = tables_of(int4.Config(), cache), tables_of(int4.Config(), cache)
    batches = [batch(seed) for seed in range(15)]
    for n, ids in enumerate(batches):
        for tables in (plain, ahead):
            if tables is ahead:
                for later in batches[n + 1 : n + 4]:
                    tables.prefetch(later)
            tables(ids)["a"].sum().backward()  # type: ignore[union-attr]
        if n == 7:
            ahead.eval()
            ahead(batch(99))
            ahead.train()
    assert_equal(plain, ahead)


@pytest.mark.parametrize("cache", [LRU, LFU])
def test_frames_travel_unrounded(cache: Cache) -> None:
    """Through chunks, as a checkpoint has them: the same table goes on with the same bits."""
    one, other = (tables_of(int8.Config(), cache) for _ in range(2))
    for seed in range(10):
        step(one, seed)
    step(other, 77)  # something to forget
    bytes_frames = []
    for chunk in one.chunks(2000):
        other.load_chunk(chunk)
        bytes_frames += [sum(t.nbytes for t in chunk.fields.values())] * chunk.is_cache
    assert len(bytes_frames) > 5 and max(bytes_frames) < 2200
    other.set_extra_state(one.get_extra_state())
    assert_equal(one, other)
    for seed in range(10, 30):
        assert torch.equal(step(one, seed), step(other, seed))
    assert_equal(one, other)


def test_frames_that_find_no_way_are_rounded_and_counted() -> None:
    large, small, none = (
        tables_of(int8.Config(), cache)
        for cache in (Cache(fraction=0.5), Cache(fraction=0.06), Cache())
    )
    for seed in range(20):
        step(large, seed)
    held = len(store_of(large).exact_rows()["row"])
    for tables in (small, none):
        for chunk in large.chunks():
            tables.load_chunk(chunk)
        record = tables.record("t")
        kept = len(store_of(tables).exact_rows()["row"]) if tables is small else 0
        assert kept + record.rounded == held and record.rounded > 30
        apart = (record.weight - large.record("t").weight).abs().max(1).values
        step_R = (large.record("t").weight.amax(1) - large.record("t").weight.amin(1)) / 255
        assert bool((apart <= 1.01 * step_R).all())


def test_bytes_are_what_is_allocated() -> None:
    for cache, format in itertools.product(
        (LRU, LFU, Cache(bytes=10_000), Cache()), FORMATS.values()
    ):
        component = Component(name="t", rows=ROWS, dim=DIM, format=format, cache=cache)
        tables = tables_of(format, cache, of=rowwise_adagrad.Config())
        store = tables.record("t").store
        assert isinstance(store, torch.nn.Module)
        assert memory_bytes(component, ROWS, DIM) == sum(
            buffer.nbytes for buffer in store.buffers()
        )


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("mode", ["fused", "deferred"])
@pytest.mark.parametrize("name", ["int8", "int4", "bf16"])
def test_gradients_that_are_not_finite_spoil_no_row_and_lose_none(
    name: str, mode: str, impl: Impl
) -> None:
    """Their rows keep their bits, in frames and beneath; the others learn; later batches push them
    out.
    """
    cached = tables_of(FORMATS[name], LRU, mode=mode, of=rowwise_adagrad.Config(lr=0.1), impl=impl)
    for seed in range(10):
        step(cached, seed)
    store, record, ids = store_of(cached), cached.record("t"), batch(10)
    found = cached(ids)["a"]
    entered, before = content(cached), record.weight.clone()
    up = torch.zeros_like(found)  # type: ignore[arg-type]
    up[:8], up[8:16], up[16:] = torch.nan, torch.inf, 1.0
    found.backward(up)  # type: ignore[union-attr]
    cached.update()
    a = ids["a"]
    bag_N = torch.arange(len(a.lengths_B)).repeat_interleave(a.lengths_B)
    bad = a.values_N[bag_N < 16].unique()
    good = [row for row in a.values_N[bag_N >= 16].unique().tolist() if row not in bad.tolist()]
    assert len(bad) > 5 and len(good) > 5
    slots = store.slots_of(bad)
    assert bool((slots < len(store.frame("tag"))).any()) and bool(
        (slots >= len(store.frame("tag"))).any()
    )
    assert torch.equal(record.weight[bad], before[bad])
    assert int((record.weight[good] != before[good]).any(1).sum()) > len(good) // 2
    assert torch.equal(content(cached)["frames' row"], entered["frames' row"])
    for seed in range(11, 40):
        step(cached, seed)
    assert all(bool(t.isfinite().all()) for t in content(cached).values() if t.is_floating_point())
    assert bool(record.weight.isfinite().all())


@pytest.mark.parametrize("rows", [1, 31, 33, 42, 425, 500])
def test_a_fraction_of_one_has_a_frame_for_each_row_and_bytes_are_a_bound(rows: int) -> None:
    def frames(rows: int, **cache: Any) -> int:
        component = Component(
            name="t", rows=rows, dim=12, format=int8.Config(), cache=Cache(**cache)
        )
        return exact_frames(component, rows)

    assert rows <= frames(rows, fraction=1.0) < rows + 32
    for count in (32, 33, 95, 96):
        assert frames(1000, bytes=count * 65) == count // 32 * 32
    assert frames(rows, bytes=1) == frames(rows, fraction=1e-9) == 32


def test_bytes_of_a_cache_are_those_of_all_parts() -> None:
    """The plan does not decide how many frames a table has."""
    whole = Component(
        name="t", rows=100_000, dim=16, format=int8.Config(), cache=Cache(bytes=1_000_000)
    )
    frames = exact_frames(whole, 100_000)
    assert exact_bytes(whole, 16) * frames <= 1_000_000
    assert 4 * exact_frames(whole, 25_000) in range(frames - 4 * 32, frames + 1)
    cut = replace(whole, dim=24, format=fp16.Config())
    parts = [
        RowRecords(cut, 0, columns=columns).store.levels[0].count for columns in ((0, 8), (8, 24))
    ]
    assert parts[0] == parts[1] == exact_frames(cut, 100_000)


def test_a_row_that_was_not_updated_in_its_frame_is_not_rounded_again() -> None:
    """When it finds no frame where a checkpoint is loaded: what lies beneath is right."""
    component = Component(
        name="t", rows=1000, dim=8, format=int4.Config(), cache=Cache(fraction=0.5)
    )
    record, other = (
        RowRecords(replace(component, cache=cache), 0) for cache in (component.cache, Cache())
    )
    record.store.admit(torch.arange(0, 1000, 3), record.kernel_table)
    before = other.store.read(slice(None))["weight"].clone()
    for chunk in record.chunks(1 << 20):
        other.load_chunk(chunk)
    assert other.rounded == 0 and torch.equal(other.store.read(slice(None))["weight"], before)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fraction": 1.5}, "fraction: 1.5 is out of range; .* at most 1"),
        ({"fraction": -0.1}, "fraction: -0.1 is out of range; give a number of 0 or more"),
        ({"fraction": 0.1, "bytes": 5}, "fraction and bytes are given; choose one"),
        ({"protect": 0}, "protect: 0 is out of range; give a number of 1 or more"),
    ],
)
def test_bad_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Cache(**settings)


class Model(RuleBasedStateMachine):
    """A cached table beside a dict of what each row is worth exactly, two sets of ways."""

    @initialize(
        name=st.sampled_from(["int8", "bf16"]),
        policy=st.sampled_from(POLICIES.names()),
        protect=st.integers(1, 3),
    )
    def begin(self, name: str, policy: Any, protect: int) -> None:
        self.format = FORMATS[name]
        self.make = lambda: tables_of(
            self.format, Cache(fraction=0.128, policy=policy, protect=protect), mode="deferred"
        )
        self.tables = self.make()
        self.values = dict(enumerate(self.tables.record("t").weight.clone()))
        self.pending: dict[int, torch.Tensor] = {}

    def is_in(self) -> set[int]:
        return set(store_of(self.tables).exact_rows()["row"].tolist())

    @rule(seed=st.integers(0, 1000))
    def learn(self, seed: int) -> None:
        before = self.is_in()
        ids = batch(seed, 12)
        found = self.tables(ids)
        left = before - self.is_in()
        weight = self.tables.record("t").weight
        for row in left:  # rounded, at most one step away
            step = (
                (self.values[row].max() - self.values[row].min()) / 255
                if isinstance(self.format, int8.Config)
                else self.values[row].abs().max() / 128
            )
            assert (weight[row] - self.values[row]).abs().max() <= 1.01 * step
            self.values[row] = weight[row].clone()
        a = ids["a"]
        (found["a"] * 0.5).sum().backward()  # type: ignore[operator]
        for row in a.values_N.tolist():
            self.pending[row] = self.pending.get(row, torch.zeros(DIM)) + 0.5
        assert not self.pending.keys() & left, "a row left before it had learnt"

    @rule()
    def update(self) -> None:
        is_in = self.is_in()
        self.tables.update()
        weight = self.tables.record("t").weight
        for row, grad in self.pending.items():
            exact = self.values[row] - 0.5 * grad
            if row in is_in:
                torch.testing.assert_close(weight[row], exact)
            self.values[row] = weight[row].clone()
        self.pending = {}

    @rule()
    def discard(self) -> None:
        self.tables.discard()
        self.pending = {}

    @rule(seed=st.integers(0, 1000))
    def evaluate(self, seed: int) -> None:
        self.tables.eval()
        self.tables(batch(seed))
        self.tables.train()

    @rule(seed=st.integers(0, 1000))
    def look_ahead(self, seed: int) -> None:
        self.tables.prefetch(batch(seed))

    @precondition(lambda self: not self.pending)
    @rule()
    def reopen(self) -> None:
        again = self.make()
        for chunk in self.tables.chunks(3000):
            again.load_chunk(chunk)
        again.set_extra_state(self.tables.get_extra_state())
        assert_equal(self.tables, again)
        self.tables = again

    def teardown(self) -> None:
        if hasattr(self, "tables"):
            weight = self.tables.record("t").weight
            for row, value in self.values.items():
                assert torch.equal(weight[row], value), row


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
