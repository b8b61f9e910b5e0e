"""Tables whose ids come and go, on many ranks: who has a row does not depend on where it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from sparrow.core import Chunk, KeyedJagged, UserError
from sparrow.core.mixing import unmix63
from sparrow.distributed import World
from sparrow.embeddings import (
    ON_CPU,
    UNALLOCATED,
    Direct,
    EmbeddingTables,
    Feature,
    Placement,
    TableSpec,
)
from sparrow.embeddings.spec import Cache
from sparrow.extensions.dynamic_ids.addressing import Dynamic
from sparrow.kernels.formats import fp16
from sparrow.kernels.row_index import Policy
from sparrow.kernels.rules import sgd
from sparrow.sharding import (
    Codecs,
    Layout,
    column_wise,
    data_parallel,
    plan,
    row_wise,
    shard,
    table_row_wise,
    table_wise,
)
from sparrow.sharding.plan import Grid
from tests.equivalence.pool import Pool

pytestmark = pytest.mark.multi
DIM, STEPS, SAMPLES = 6, 12, 15
LAST = int(unmix63(torch.tensor((1 << 63) - 1)))  # the id with the last key
PLANS: dict[str, Callable[[int], Layout]] = {
    "table_wise": lambda size: table_wise(size - 1),
    "row_wise": lambda size: row_wise(size),
    "column_wise": lambda size: column_wise((0, 1)),
    "table_row_wise": lambda size: table_row_wise(0, size),
}
POLICIES: dict[str, Policy] = {
    "lru": Policy(capacity=60, buckets=4),
    "lfu": Policy(capacity=60, buckets=4, evict="lfu", half_life=100.0, after=2),
    "ttl": Policy(capacity=90, buckets=8, ttl=60, probability=0.7),
    "time": Policy(capacity=60, buckets=2, ttl=9, clock="time"),
    "one bucket": Policy(capacity=60),
}
FEATURES = [
    Feature(name="a", table="t"),
    Feature(name="b", table="t", pooling="none"),
    Feature(name="c", table="u"),
]


def tables_of(policy: str, placement: Placement = ON_CPU, **choices: Any) -> EmbeddingTables:
    rule = sgd.Config(lr=0.25)
    dynamic = TableSpec(
        name="t",
        dim=DIM,
        addressing=Dynamic(POLICIES[policy]),
        rule=rule,
        init_scale=1.0,
        **choices,
    )
    plain = TableSpec(name="u", dim=4, addressing=Direct(300), rule=rule)
    return EmbeddingTables([dynamic, plain], FEATURES, seed=1, mode="deferred", placement=placement)


def ids_of(step: int, ranks: list[int], unique: bool = False) -> KeyedJagged:
    """Ids that drift, many of them once; hashes of 63 bits among them."""
    values: dict[str, list[int]] = {name: [] for name in "abc"}
    for rank in ranks:
        g = torch.Generator().manual_seed(100 * step + rank)
        for name in "ab":
            near = (torch.rand(2 * SAMPLES, generator=g) ** 3 * 80).long() + 5 * step
            near[0] = LAST
            values[name] += torch.where(
                (near % 7 == 3) & (near < LAST), near * 1_000_003 * 4_000_037 * 1_000, near
            ).tolist()
        values["c"] += torch.randint(0, 300, (2 * SAMPLES,), generator=g).tolist()
    lengths = torch.full((3 * len(ranks) * SAMPLES,), 2)
    found = [v for name in "abc" for v in values[name]]
    return KeyedJagged(
        keys=("a", "b", "c"),
        values_N=torch.tensor(found),
        lengths=lengths,
        time=step + max(ranks) // 9,
    )


def step_on(tables: EmbeddingTables, ids: KeyedJagged) -> None:
    out: Any = tables(ids)
    loss = (out["a"] * 2.0).sum() + (out["b"].values_N * 4.0).sum() + (out["c"] * 2.0).sum()
    loss.backward()  # whole gradients add up to the same in any order


def steps(tables: EmbeddingTables, ranks: list[int], first: int = 0, last: int = STEPS) -> None:
    for step in range(first, last):
        step_on(tables, ids_of(step, ranks))
        if len(ranks) == 1 and step % 3 == 1 and step + 1 < last:
            tables.prefetch(ids_of(step + 1, ranks))  # is never looked up: it counts for nothing
        if step % 4 == 2:
            tables.discard()
        else:
            tables.update()
        tables.eval()
        with torch.no_grad():
            tables(ids_of(90 + step, ranks))  # only reads
        tables.train()


def sharded(world: World, policy: str, layout: str, choices: dict[str, Any]) -> dict[str, Any]:
    tables = tables_of(policy, UNALLOCATED, **choices)
    shard(tables, {"t": PLANS[layout](world.size), "u": data_parallel()}, world, Codecs())
    steps(tables, [world.rank])
    chunks = [
        Chunk(**{**vars(chunk), "fields": {n: t.clone() for n, t in chunk.fields.items()}})
        for chunk in tables.chunks()
    ]
    told = {
        record.component.name: (record.id_counts, record.columns) for record in tables.all_records()
    }
    return {"chunks": chunks, "passed": tuple(tables.exchange.parts[0].passed), "told": told}


def same(one: EmbeddingTables, other: EmbeddingTables) -> None:
    mine, its = one.record("t").fields, other.record("t").fields
    live = mine["id"] != -1  # a row that nobody has may hold what it likes
    for name in mine:
        assert torch.equal(mine[name][live], its[name][live]), name


@pytest.mark.parametrize(
    ("policy", "layout", "size"),
    [  # quick: each policy with each layout, on two ranks or on three
        pytest.param(
            policy, layout, size, marks=() if size == 2 + (i + j) % 2 else pytest.mark.slow
        )
        for i, policy in enumerate(POLICIES)
        for j, layout in enumerate(PLANS)
        for size in (2, 3, 5)
    ],
)
def test_ids_have_the_same_rows_on_any_number_of_ranks(
    ranks: Callable[[int], Pool], policy: str, layout: str, size: int
) -> None:
    got = ranks(size).run(sharded, policy, layout, {})
    whole = tables_of(policy)
    steps(whole, list(range(size)))
    told = whole.record("t").id_counts
    assert told["admitted"] > 60 and told["evicted"] + told["expired"] > 20, "nothing came and went"
    assert {tuple(of_rank["passed"]) for of_rank in got} == {tuple(whole.exchange.parts[0].passed)}
    first_columns = [
        t
        for of_rank in got
        for t, columns in [of_rank["told"].get("t", ({}, (0, 0)))]
        if columns[0] == 0
    ]
    assert {name: sum(t.get(name, 0) for t in first_columns) for name in told} == told
    loaded = tables_of(policy)
    for of_rank in got:
        for chunk in of_rank["chunks"]:
            loaded.load_chunk(chunk)
    same(whole, loaded)
    # and it goes on as if nothing had been
    loaded.exchange.parts[0].passed = whole.exchange.parts[0].passed
    for tables in (whole, loaded):
        steps(tables, list(range(size)), STEPS, STEPS + 4)
    same(whole, loaded)


@pytest.mark.parametrize("layout", ["row_wise", "table_wise"])
def test_rows_with_a_cache_come_and_go_too(ranks: Callable[[int], Pool], layout: str) -> None:
    """With a frame for each row it is the table in fp32 that begins at the rounded rows."""
    choices = {"format": fp16.Config(), "cache": Cache(fraction=1.0)}
    got = ranks(2).run(sharded, "lru", layout, choices)
    whole, loaded = tables_of("lru", **choices), tables_of("lru", **choices)
    steps(whole, [0, 1])
    for chunk in sorted(
        (c for of_rank in got for c in of_rank["chunks"]), key=lambda chunk: chunk.is_cache
    ):
        loaded.load_chunk(chunk)
    mine, its = whole.record("t"), loaded.record("t")
    assert torch.equal(mine.fields["id"], its.fields["id"])
    live = mine.fields["id"] >= 0
    assert torch.equal(mine.weight[live], its.weight[live])


def test_copies_are_refused() -> None:
    tables = tables_of("lru")
    with pytest.raises(UserError, match="'t' has .*rows that come and go"):
        shard(tables, {"t": data_parallel(), "u": data_parallel()}, World(), Codecs())
    components = [component for spec in tables.specs for component in spec.components]
    assert not plan("auto", components, Grid(1, 2))["t"].is_replicated
