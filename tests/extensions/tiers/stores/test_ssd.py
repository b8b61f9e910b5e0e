"""Rows on an SSD: whatever the frames, the batches looked at and what comes between, the bits are
those of memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from torch import Tensor, nn

from sparrow import checkpoint
from sparrow.core import Chunk, Jagged, KeyedJagged, UserError
from sparrow.embeddings import (
    Addressing,
    Component,
    Direct,
    EmbeddingTables,
    Feature,
    Numbering,
    Placement,
    TableSpec,
)
from sparrow.embeddings.addressing import quotient_remainder
from sparrow.embeddings.records import RowRecords
from sparrow.embeddings.sizes import memory_bytes
from sparrow.embeddings.spec import Cache, Tier, in_memory
from sparrow.extensions.dynamic_ids import addressing as dynamic
from sparrow.extensions.tiers import frames as of_frames
from sparrow.extensions.tiers import host as of_host
from sparrow.extensions.tiers import ssd
from sparrow.extensions.tiers.frames import tier_frames
from sparrow.extensions.tiers.stores import cached as of_cached
from sparrow.extensions.tiers.stores import ssd as of_ssd
from sparrow.extensions.tiers.stores.cached import CachedStore, ssd_of
from sparrow.extensions.tiers.stores.host import HostStore, SsdRows
from sparrow.extensions.tiers.stores.saved import Saved
from sparrow.extensions.tiers.stores.ssd import SsdStore, queue_bytes
from sparrow.kernels import row_cache
from sparrow.kernels.block_io import Blocks
from sparrow.kernels.formats import bf16, fp16, fp32, int4, int8, mxfp8, split_bf16
from sparrow.kernels.row_cache.policies import POLICIES
from sparrow.kernels.rules import (
    Regularization,
    RowRule,
    adagrad,
    adam,
    rowwise_adagrad,
    rowwise_adam,
    sgd,
)
from sparrow.trained.build import load_weights

ROWS, DIM = 500, 12
SMALL = ssd.Config(fraction=0.128)  # two sets
LFU = ssd.Config(fraction=0.4, policy="lfu")  # more, since more rows find no way
FORMATS: dict[str, Any] = {
    "fp32": fp32.Config(),
    "bf16": bf16.Config(rounding="nearest"),
    "split_bf16": split_bf16.Config(),
    "int8": int8.Config(rounding="nearest"),
    "fp16, stochastic": fp16.Config(),
    "int4, stochastic": int4.Config(),
    "mxfp8, stochastic": mxfp8.Config(),
    "bf16, state too": bf16.Config(),
}
RULES: dict[str, RowRule] = {
    "sgd": sgd.Config(lr=0.5),
    "rowwise_adagrad": rowwise_adagrad.Config(lr=0.1),
    "adagrad": adagrad.Config(lr=0.1),
    "adam": adam.Config(lr=0.01),
    "rowwise_adam": rowwise_adam.Config(lr=0.01),
    "regularized": adagrad.Config(
        lr=0.1,
        regularization=Regularization(weight_decay=0.01, decay="l2", clip_norm=0.5, max_norm=3.0),
    ),
}


def tables_of(
    folder: Path | None = None,
    tier: Tier = SMALL,
    *,
    mode: Any = "fused",
    of: RowRule | None = None,
    format: Any = None,
    window: int = 3,
    addressing: Addressing | None = None,
    state: Any = "fp32",
    cache: Cache | None = None,
    host: bool = False,
    beneath: Tier | None = None,
) -> EmbeddingTables:
    """Tables in memory, on an SSD where there is a folder, or beneath frames of a device that is
    the host itself.

    host: with a folder an SSD is beneath that. beneath: its tier, by default the same.
    """
    on = tier if folder else in_memory()
    if host:
        on = of_host.Config(**vars(tier), beneath=(beneath or tier) if folder else None)
    spec = TableSpec(
        name="t",
        dim=DIM,
        addressing=addressing or Direct(ROWS),
        format=format or fp32.Config(),
        init_scale=1.0,
        rule=of or RULES["rowwise_adagrad"],
        tier=on,
        state=state,
        cache=cache or Cache(),
    )
    features = [Feature(name="a", table="t"), Feature(name="b", table="t", pooling="mean")]
    placement = Placement(folder=folder, window=window)
    return EmbeddingTables([spec], features, seed=1, mode=mode, placement=placement)


def batch(seed: int, count: int = 6) -> KeyedJagged:
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (2 * count,), generator=g)
    ids_N = (torch.rand(int(lengths.sum()), generator=g) ** 3 * ROWS).long()
    return KeyedJagged(keys=("a", "b"), values_N=ids_N, lengths=lengths)


def forward(tables: EmbeddingTables, ids: KeyedJagged) -> Tensor:
    found = [v.values_N if isinstance(v, Jagged) else v for v in tables(ids).values()]
    return torch.cat(found, 1)


def backward(out: Tensor, seed: int) -> None:
    (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(seed))).sum().backward()


def step(tables: EmbeddingTables, seed: int, ids: KeyedJagged | None = None) -> Tensor:
    out = forward(tables, batch(seed) if ids is None else ids)
    backward(out, seed)
    tables.update()
    return out.detach()


def stores_of(tables: EmbeddingTables) -> list[SsdStore]:
    return [store for record in tables.all_records() if (store := ssd_of(record.store))]


def assert_equal(one: EmbeddingTables, other: EmbeddingTables) -> None:
    for mine, its in zip(one.all_records(), other.all_records(), strict=True):
        assert mine.fields.keys() == its.fields.keys()
        for name, tensor in mine.fields.items():
            assert torch.equal(tensor, its.fields[name]), name
        if isinstance(mine.store, CachedStore) and isinstance(its.store, CachedStore):
            frames, others = in_order(mine.store), in_order(its.store)
            for name, tensor in frames.items():
                assert torch.equal(tensor, others[name]), name


def in_order(store: CachedStore) -> dict[str, Tensor]:
    """The exact rows, in the order of rows."""
    saved = store.exact_rows()
    order = saved["row"].argsort()
    return {name: of if name in ("batch", "counts") else of[order] for name, of in saved.items()}


def evaluated(tables: EmbeddingTables, seed: int) -> Tensor:
    tables.eval()
    with torch.no_grad():
        out = forward(tables, batch(seed, 60))
    tables.train()
    return out


@pytest.mark.parametrize("mode", ["fused", "deferred"])
@pytest.mark.parametrize(
    ("format", "name"),
    [
        (form, name)
        for form, name in product(FORMATS, RULES)
        if form == "fp32" or name in ("sgd", "rowwise_adagrad", "adam")
    ],
)
def test_the_bits_are_those_of_memory(tmp_path: Path, format: str, name: str, mode: str) -> None:
    make: Any = partial(
        tables_of,
        of=RULES[name],
        format=FORMATS[format],
        mode=mode,
        state="bf16" if "state" in format else "fp32",
    )
    plain = make()
    size = 150 * (plain.record("t").component.bytes_row + 8)
    tiers = [SMALL, LFU, ssd.Config(fraction=1.0), ssd.Config(bytes=size), ssd.Config(bytes=1)]
    made = [*(make(tmp_path, tier) for tier in tiers), make(host=True), make(tmp_path, host=True)]
    for seed in range(40):
        want = step(plain, seed)
        for tables in made:
            assert torch.equal(step(tables, seed), want)
        if seed % 9 == 0:
            want = evaluated(plain, seed)
            assert all(torch.equal(evaluated(tables, seed), want) for tables in made)
    for tables in made:
        assert_equal(plain, tables)
    *_, over_ssd = stores = [store for tables in made for store in stores_of(tables)]
    assert [store.left > 20 for store in stores] == [True, True, False, True, True, True, True]
    assert isinstance(over_ssd, HostStore) and isinstance(over_ssd._records, SsdRows)
    assert over_ssd._records.store.left > 20 and over_ssd.counters["blocks_read"] > 20


@pytest.mark.parametrize("tier", [replace(SMALL, fraction=0.25), LFU])
def test_looking_ahead_changes_neither_bits_nor_who_leaves(tmp_path: Path, tier: Tier) -> None:
    """Nor does an evaluation, a batch that is left out, or the order in which reads and writes
    end.
    """
    plain, batches = tables_of(mode="deferred"), [batch(seed) for seed in range(30)]
    made = [tables_of(tmp_path, tier, mode="deferred", window=5) for _ in range(5)]
    for n, ids in enumerate(batches):
        for depth, tables in [(0, plain), *enumerate(made)]:
            out = forward(tables, ids)
            for later in batches[n + 1 : n + 1 + depth]:
                tables.prefetch(later)
            if n % 7 == depth:
                evaluated(tables, n)
            backward(out, n)
            if n % 5 == 3:
                tables.discard()
            tables.update()
    counters = []
    for tables in made:
        assert_equal(plain, tables)
        counters += [(store.hits, store.used, store.left) for store in stores_of(tables)]
        assert torch.equal(stores_of(tables)[0].frames.tags_F, stores_of(made[0])[0].frames.tags_F)
    assert len(set(counters)) == 1 and counters[0][2] > 5


def test_batches_add_up_before_an_update(tmp_path: Path) -> None:
    """Clipped in between: collected gradients are of rows, in their order, so that a norm has the
    same bits.
    """
    made = [
        tables_of(mode="deferred"),
        tables_of(tmp_path, ssd.Config(fraction=0.3), mode="deferred", window=6),
    ]
    for seed in range(0, 60, 3):
        norms = []
        for tables in made:
            for number in range(3):
                backward(forward(tables, batch(seed + number)), seed)
            found = [of.grad_UD for of in tables.gradients().values()]
            norms.append(torch.nn.utils.get_total_norm(found))
            for grad in found:
                grad.mul_(0.5 / norms[-1])
            tables.update()
        assert torch.equal(*norms)
    assert_equal(*made)
    assert stores_of(made[1])[0].left > 50


def learn_nothing_at_times(made: list[EmbeddingTables]) -> None:
    """Train on gradients of which some are not finite."""
    for seed in range(40):
        for tables in made:
            out = forward(tables, batch(seed))
            up = torch.ones_like(out)
            up[: seed % 5], up[seed % 5 : 2 * (seed % 5)] = torch.nan, torch.inf
            out.backward(up)


def test_gradients_that_are_not_finite_leave_rows_as_in_memory(tmp_path: Path) -> None:
    """Such a row does not learn, but it is touched; that is kept when it leaves."""
    made = [tables_of(), tables_of(tmp_path)]
    learn_nothing_at_times(made)
    assert_equal(*made)
    rows = made[0].record("t")
    untaught = (rows.fields["touched"] == 1) & (
        rows.weight == RowRecords(rows.component, 1).weight
    ).all(1)
    assert int(untaught.sum()) > 5


@pytest.mark.parametrize("operation", ["mult", "add", "concat"])
def test_tables_of_several_components(tmp_path: Path, operation: Any) -> None:
    """Products too, though in memory both rows are multiplied while they are looked up."""
    addressing = quotient_remainder.Config(collisions=2, operation=operation).build(Numbering(ROWS))
    made = [tables_of(addressing=addressing), tables_of(tmp_path, addressing=addressing)]
    for seed in range(25):
        one, other = (step(tables, seed) for tables in made)
        assert torch.equal(one, other)
    assert_equal(*made)


def test_weights_of_ids_learn(tmp_path: Path) -> None:
    made = [tables_of(), tables_of(tmp_path)]
    for mode in ("fused", "off"):
        for seed in range(12):
            grads = []
            for tables in made:
                tables.mode = mode
                ids = batch(seed)
                weights_N = torch.rand(
                    len(ids.values_N), generator=torch.Generator().manual_seed(seed)
                )
                weights_N.requires_grad_()
                backward(forward(tables, replace(ids, weights_N=weights_N)), seed)
                grads.append(weights_N.grad)
            assert torch.equal(*grads)
    assert_equal(*made)


def test_an_evaluation_inserts_nothing_and_pins_nothing(tmp_path: Path) -> None:
    tables = tables_of(tmp_path)
    for seed in range(10):
        step(tables, seed)
    (store,) = stores_of(tables)
    before = (
        [t.clone() for t in (*store.frames.__dict__.values(),) if isinstance(t, Tensor)],
        store.counters,
    )
    held = store.nbytes if hasattr(store, "nbytes") else sum(b.nbytes for b in store.buffers())
    for seed in range(30):
        evaluated(tables, 100 + seed)
    after = [t for t in store.frames.__dict__.values() if isinstance(t, Tensor)]
    assert all(torch.equal(one, other) for one, other in zip(before[0], after, strict=True))
    for name in ("hits", "used", "left"):
        assert store.counters[name] == before[1][name]
    assert len(store.levels) == 1 and sum(b.nbytes for b in store.buffers()) == held
    for seed in range(10, 60):  # nothing is pinned: else there would be too few frames
        step(tables, seed)


def test_rows_that_never_learnt_are_neither_stored_nor_read(tmp_path: Path) -> None:
    plain, tables = tables_of(), tables_of(tmp_path)
    for chunk in plain.chunks(1000):
        tables.load_chunk(chunk)
    evaluated(tables, 1)
    (store,) = stores_of(tables)
    store._blocks.sync()
    assert store.counters["blocks_written"] == store.counters["blocks_read"] == 0
    assert_equal(plain, tables)


def carry(one: EmbeddingTables, other: EmbeddingTables) -> None:
    """Both train, one's chunks go to the other, and both go on alike."""
    for seed in range(20):
        step(one, seed)
        step(other, 500 + seed)
    for chunk in one.chunks(3000):
        other.load_chunk(chunk)
    other.set_extra_state(one.get_extra_state())
    assert_equal(one, other)
    for seed in range(20, 50):
        assert torch.equal(step(one, seed), step(other, seed))
    assert_equal(one, other)


@pytest.mark.parametrize("to", ["frames", "beneath", "memory"])
def test_chunks_carry_every_bit_from_tier_to_tier(tmp_path: Path, to: str) -> None:
    """Also over rows that were others, in frames and beneath."""
    one = tables_of(tmp_path)
    other = {"frames": partial(tables_of, tmp_path, ssd.Config(fraction=1.0)),
             "beneath": partial(tables_of, tmp_path), "memory": tables_of}[to]()  # fmt: skip
    carry(one, other)


def test_parts_of_columns_join(tmp_path: Path) -> None:
    """Rows written column by column: what is not given stays."""
    component = Component(name="t", rows=ROWS, dim=DIM, rule=RULES["adagrad"], init_scale=1.0)
    whole = RowRecords(component, 1)
    record = RowRecords(replace(component, tier=SMALL), 2, placement=Placement(folder=tmp_path))
    parts = [RowRecords(component, 1, columns=columns) for columns in ((0, 5), (5, DIM))]
    assert isinstance(record.store, SsdStore)
    record.store.fetch(torch.arange(0, ROWS, 9), 1, 0)
    for part in parts:
        for chunk in part.chunks(999):
            record.load_chunk(chunk)
    assert torch.equal(record.weight, whole.weight)
    some = torch.tensor([7, 450, 9, 3])
    for of in (whole, record):
        of.store.write(some, {"weight": torch.full((1, 2), 3.0)}, slice(4, 6))
        of.store.write(slice(100, 300), {"touched": torch.ones(1, dtype=torch.uint8)})
    for name, tensor in whole.fields.items():
        assert torch.equal(tensor, record.fields[name])
        assert torch.equal(tensor[some], record.store.read(some)[name])


def test_what_waits_to_be_written_is_bounded_however_much_is_written_at_once(
    tmp_path: Path,
) -> None:
    component = Component(
        name="t", rows=20 * ROWS, dim=DIM, init_scale=1.0, tier=replace(SMALL, fraction=0.01)
    )
    whole = RowRecords(replace(component, tier=in_memory()), 1)
    record = RowRecords(component, 2, placement=Placement(folder=tmp_path))
    for chunk in whole.chunks(1 << 30):
        record.load_chunk(chunk)
    assert isinstance(record.store, SsdStore)
    _, waiting_U, _ = record.store._blocks.snapshot()
    assert (
        len(waiting_U) * component.bytes_row
        <= queue_bytes(component, component.rows)
        < component.rows
    )
    assert torch.equal(record.weight, whole.weight)


def test_rows_wider_than_a_page(tmp_path: Path) -> None:
    """Their blocks are as large as they need."""
    component = Component(
        name="t", rows=100, dim=1500, rule=RULES["adam"], init_scale=1.0, tier=SMALL
    )
    whole = RowRecords(replace(component, tier=in_memory()), 1)
    record = RowRecords(component, 2, placement=Placement(folder=tmp_path))
    for chunk in whole.chunks(1 << 30):
        record.load_chunk(chunk)
    assert torch.equal(record.weight, whole.weight) and stores_block(record) == 32768


def stores_block(record: RowRecords) -> int:
    assert isinstance(record.store, SsdStore)
    return record.store._blocks.layout.block


def test_a_part_begins_as_in_the_whole(tmp_path: Path) -> None:
    component = Component(name="t", rows=ROWS, dim=DIM, init_scale=0.3, init_mean=1.0, tier=SMALL)
    whole = RowRecords(replace(component, tier=in_memory()), 4).weight
    part = RowRecords(component, 4, (100, 333), (5, DIM), Placement(folder=tmp_path))
    assert torch.equal(part.weight, whole[100:333, 5:])


def test_batches_that_do_not_fit_are_refused_and_the_table_stays_whole(tmp_path: Path) -> None:
    plain, tables = tables_of(), tables_of(tmp_path)
    for seed in range(5):
        step(plain, seed)
        step(tables, seed)
    told = (
        r"table 't': \d+ rows of a batch find no frame, and \d+ frames are left beside those of the"
        r" batches before; "
        "raise tables.tier.fraction or bytes, or lower data.batch_size or loop.accumulate"
    )
    with pytest.raises(UserError, match=told):
        tables(batch(7, 200))
    assert_equal(plain, tables)
    over_ssd = tables_of(tmp_path, ssd.Config(fraction=1.0), host=True, beneath=SMALL)
    for seed in range(5):
        step(over_ssd, seed)
    with pytest.raises(UserError, match=told.replace("tables.tier", "tables.tier.beneath")):
        over_ssd(batch(7, 200))
    assert_equal(plain, over_ssd)
    with pytest.raises(UserError, match=told):  # none of these is settled
        for seed in range(20, 40):
            tables(batch(seed))
    tables.discard()
    for seed in range(5, 30):
        assert torch.equal(step(plain, seed), step(tables, seed))


def test_a_batch_that_was_given_up_pins_nothing(tmp_path: Path) -> None:
    plain, tables = tables_of(), tables_of(tmp_path)
    for seed in range(40):
        ids = batch(1000 + seed)
        handle = tables.prepare(ids)
        tables.exchange.prefetch(handle.inner)
        tables.release(handle)
        assert torch.equal(step(plain, seed), step(tables, seed))
    assert_equal(plain, tables)


@pytest.mark.parametrize("mode", ["fused", "deferred"])
def test_rows_of_an_evaluation_do_not_learn(tmp_path: Path, mode: str) -> None:
    tables = tables_of(tmp_path, mode=mode).eval()
    out = forward(tables, batch(1))
    told = (
        "table 't': rows are to learn that no batch of training has; look them up in training mode,"
        " not in eval"
    )
    with pytest.raises(UserError, match=told):
        backward(out, 1)
        tables.update()


def test_memory_is_what_is_allocated_and_the_file_has_no_name(tmp_path: Path) -> None:
    for tier in (SMALL, replace(SMALL, policy="lfu"), ssd.Config(bytes=15_000)):
        tables = tables_of(tmp_path, tier)
        (store,) = stores_of(tables)
        component = tables.record("t").component
        frames, spare = tier_frames(component, ROWS)
        beside = memory_bytes(component, ROWS, DIM) - sum(b.nbytes for b in store.buffers())
        assert beside == spare * 4 + queue_bytes(component, ROWS) + 12 * store._blocks.layout.blocks
        if tier.bytes:
            assert 0.5 * tier.bytes < (frames + spare) * (component.bytes_row + 8) <= tier.bytes
    assert not list(tmp_path.iterdir())


def test_a_copy_of_what_is_saved_stays_as_it_is(tmp_path: Path) -> None:
    """Its rows and the counts of all; a checkpoint in the background is written from it while
    batches learn.
    """
    tables = tables_of(tmp_path, LFU)
    (store,) = stores_of(tables)
    store.name_file(tmp_path / "blocks")
    for seed in range(8):
        step(tables, seed)
    (saved,) = tables.saved()
    assert isinstance(saved, Saved)
    copy, count = saved.copied(), saved.bounds[-1]
    before = [of.clone() for of in (saved.counts_R, *saved.fields(0, count).values())]
    for seed in range(8, 30):
        step(tables, seed)
    assert not torch.equal(store.get_buffer("counts"), before[0])
    for mine, of in zip((copy.counts_R, *copy.fields(0, count).values()), before, strict=True):
        assert torch.equal(mine, of)
    assert int(before[0].sum()) > 30 and copy.batches == (8, 8)
    store.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"addressing": dynamic.Config(rows=100).build(Numbering(100))},
            "its ids come and go; choose another",
        ),
    ],
)
def test_what_cannot_be_on_an_ssd_is_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    chosen = {"name": "t", "dim": DIM, "addressing": Direct(ROWS), "tier": SMALL} | change
    placement = Placement(folder=tmp_path)
    with pytest.raises(UserError, match=f"table 't': tables.tier is ssd, and .*{message}"):
        EmbeddingTables([TableSpec(**chosen)], [Feature(name="a", table="t")], placement=placement)


def test_a_folder_is_asked_for(tmp_path: Path) -> None:
    told = "table 't': tables.tier is ssd, and no folder is named; give the tables a `Placement`"
    with pytest.raises(UserError, match=told):
        EmbeddingTables([TableSpec(name="t", dim=4, addressing=Direct(9), tier=SMALL)], [])
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=".*/file/x: cannot be made .*; name another folder$"):
        tables_of(tmp_path / "file" / "x")


class Machine(RuleBasedStateMachine):
    """A table on an SSD, of two sets of two ways, beside one in memory; reads and writes end in any
    order.

    There may be exact rows above both, in as many frames.
    """

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.folder = pytest.MonkeyPatch(), TemporaryDirectory()
        for module in (row_cache, of_frames):
            self.patch.setattr(module, "WAYS", 2)
        reference = row_cache._operator.load("reference")
        self.patch.setattr(row_cache._operator, "choose", lambda impl, device: reference)
        self.patch.setattr(of_ssd, "tier_frames", lambda component, rows: (4, 24))
        self.ahead: deque[KeyedJagged] = deque()
        self.waits = 0  # batches that no update or discard has settled

    @initialize(
        chance=st.integers(0, 1000),
        policy=st.sampled_from(POLICIES.names()),
        mode=st.sampled_from(["fused", "deferred"]),
        above=st.sampled_from([None, "lru", "lfu"]),
        protect=st.integers(1, 2),
    )
    def begin(self, chance: int, policy: Any, mode: Any, above: Any, protect: int) -> None:
        self.patch.setattr(
            of_ssd, "Blocks", partial(Blocks, way="reference", chance=Random(chance))
        )
        cached: dict[str, Any] = {}
        if above:
            self.patch.setattr(of_cached, "exact_frames", lambda component, rows: 4)
            cached = {
                "cache": Cache(fraction=0.1, policy=above, protect=protect),
                "format": int8.Config(),
            }
        self.make = partial(
            tables_of, tier=replace(SMALL, policy=policy), mode=mode, window=2, **cached
        )
        self.plain, self.tables = self.make(), self.opened()
        self.saves, self.step = Path(self.folder.name) / "checkpoints", 0
        self.saved: dict[int, tuple[list[Chunk], Any]] = {}  # step -> the table in memory as it was

    def opened(self) -> EmbeddingTables:
        """A table in a file with a name."""
        tables = self.make(Path(self.folder.name))
        for store in stores_of(tables):
            store.name_file(Path(self.folder.name) / "blocks")
        return tables

    def close(self) -> None:
        for store in stores_of(self.tables):
            store.close()

    @precondition(lambda self: len(self.ahead) < 3)
    @rule(rows=st.lists(st.integers(0, 11), max_size=4))
    def look_ahead(self, rows: list[int]) -> None:
        self.ahead.append(
            KeyedJagged(
                keys=("a", "b"),
                values_N=torch.tensor(rows).long() * 40,
                lengths=torch.tensor([len(rows), 0]),
            )
        )
        self.tables.prefetch(self.ahead[-1])

    @precondition(lambda self: self.ahead and self.waits < 2)
    @rule(seed=st.integers(0, 1000))
    def learn(self, seed: int) -> None:
        ids = self.ahead.popleft()
        one, other = (forward(tables, ids) for tables in (self.plain, self.tables))
        assert torch.equal(one, other)
        for out in (one, other):
            backward(out, seed)
        self.waits += self.plain.mode == "deferred"

    @rule(seed=st.integers(0, 1000), steps=st.integers(3, 8))
    def train(self, seed: int, steps: int) -> None:
        """Steps as of a run, so that rows leave and come back."""
        random = Random(seed)
        for _ in range(steps):
            if len(self.ahead) < 3:
                self.look_ahead(random.sample(range(12), random.randrange(1, 6)))
            self.update()
            self.learn(random.randrange(1000))
        self.update()

    @rule()
    def update(self) -> None:
        for tables in (self.plain, self.tables):
            tables.update()
        self.waits = 0

    @rule()
    def discard(self) -> None:
        for tables in (self.plain, self.tables):
            tables.discard()
        self.waits = 0

    @rule(seed=st.integers(0, 1000))
    def evaluate(self, seed: int) -> None:
        assert torch.equal(*(evaluated(tables, seed) for tables in (self.plain, self.tables)))

    @rule()
    def read(self) -> None:
        assert_equal(self.plain, self.tables)

    @rule(first=st.integers(0, ROWS), count=st.integers(0, ROWS))
    def read_in_order(self, first: int, count: int) -> None:
        for store in stores_of(self.tables):
            expected = store.read(at := slice(first, min(first + count, ROWS)))
            found = store.in_order().read(at)
            assert found.keys() == expected.keys()
            assert all(torch.equal(of, expected[name]) for name, of in found.items())

    @rule(seed=st.integers(0, 1000), steps=st.integers(0, 6))
    def checkpoint(self, seed: int, steps: int) -> None:
        """After some steps, as a run writes it. Blocks that only a checkpoint before the last two
        had are free then.
        """
        self.train(seed, steps)
        self.step += 1
        parts = {"dense": nn.ModuleList([self.tables]).state_dict()}
        chunks = self.tables.saved()
        checkpoint.save(
            self.saves, self.step, identity={}, state={}, parts=parts, chunks=chunks, keep=2
        )
        for store in stores_of(self.tables):
            store.keep_only(checkpoint.steps(self.saves), self.step)
        self.saved[self.step] = copied(self.plain.chunks(3000)), self.plain.get_extra_state()

    @precondition(lambda self: self.saved)
    @rule(falls_back=st.booleans())
    def kill_and_reopen(self, falls_back: bool) -> None:
        """What was under way is lost. The last checkpoint is gone back to, or the one before if
        somebody deletes it.
        """
        self.close()
        if falls_back and len(checkpoint.steps(self.saves)) > 1:
            checkpoint.remove(self.saves, checkpoint.steps(self.saves)[-1])
        self.step = checkpoint.steps(self.saves)[-1]
        self.plain, self.tables = self.make(), self.opened()
        for chunk in self.saved[self.step][0]:
            self.plain.load_chunk(chunk)
        self.plain.set_extra_state(self.saved[self.step][1])
        load_weights(nn.ModuleList([self.tables]), checkpoint.load(self.saves))
        used = {str(store._blocks.file.path) for store in stores_of(self.tables)}
        assert used == checkpoint.load(self.saves).block_files.keys(), (
            "it does not go on with its file"
        )
        self.waits = 0
        for ids in self.ahead:
            self.tables.prefetch(ids)

    @precondition(lambda self: not self.waits)
    @rule(to_ssd=st.booleans())
    def reopen(self, to_ssd: bool) -> None:
        """From the chunks of the other tier."""
        again = self.opened()
        for chunk in (self.tables if to_ssd else self.plain).chunks(3000):
            again.load_chunk(chunk)
        again.set_extra_state(self.plain.get_extra_state())
        self.close()
        self.tables = again
        for ids in self.ahead:
            again.prefetch(ids)

    def teardown(self) -> None:
        try:
            if hasattr(self, "tables"):
                assert_equal(self.plain, self.tables)
                for step in checkpoint.steps(self.saves):
                    found = fields_of(list(checkpoint.load(self.saves, step).chunks()))
                    for name, of in fields_of(self.saved[step][0]).items():
                        assert torch.equal(found[name], of), (step, name)
                self.close()
        finally:
            self.patch.undo()
            self.folder.cleanup()


def copied(chunks: Iterable[Chunk]) -> list[Chunk]:
    return [
        replace(chunk, fields={name: of.clone() for name, of in chunk.fields.items()})
        for chunk in chunks
    ]


def fields_of(chunks: list[Chunk]) -> dict[tuple[bool, str], Tensor]:
    """The fields of rows, and those of the frames of a cache above them, in the order of rows.

    Chunks of other sizes have the frames in another order.
    """
    parts: dict[tuple[bool, str], list[Tensor]] = {}
    for chunk in chunks:
        for name, of in chunk.fields.items():
            parts.setdefault((chunk.is_cache, name), []).append(of)
    found = {
        name: of[0] if name == (True, "batch") else torch.cat(of) for name, of in parts.items()
    }
    if (row := found.get((True, "row"))) is not None:
        order, alike = row.argsort(), ((True, "batch"), (True, "counts"))
        found |= {name: of[order] for name, of in found.items() if name[0] and name not in alike}
    return found


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=15, stateful_step_count=30, deadline=None)
