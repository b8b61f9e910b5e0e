"""Sharded = single for second members: fp16 rows, a table of two components, a store whose slots
are not rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from sparrow.core import Chunk, Jagged, KeyedJagged, UserError
from sparrow.distributed import World
from sparrow.embeddings import (
    ON_CPU,
    UNALLOCATED,
    Direct,
    EmbeddingTables,
    Feature,
    Numbering,
    Placement,
    TableSpec,
)
from sparrow.embeddings.addressing import coprime, path, quotient_remainder
from sparrow.embeddings.addressing.mixed_dimension import MixedDimension
from sparrow.kernels.formats import bf16, fp16, int4, int8, mxfp4, mxfp8, split_bf16
from sparrow.kernels.rules import adagrad, rowwise_adagrad, sgd
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
from tests.embeddings.members import quotient
from tests.embeddings.members.scattered import Scattered
from tests.embeddings.test_members import Scaled
from tests.equivalence import cases
from tests.equivalence.conftest import HOSTS
from tests.equivalence.pool import Pool

pytestmark = pytest.mark.multi
ROWS, STEPS = 23, 3
RULE = rowwise_adagrad.Config(lr=0.3)
TABLES: dict[str, dict[str, Any]] = {
    "product": {"addressing": quotient.Quotient(ROWS, 4)},
    "sum": {"addressing": quotient.Quotient(ROWS, 4, "sum")},
    "mult": {"addressing": quotient_remainder.Config(sizes=(6, 2, 2)).build(Numbering(ROWS))},
    "concat": {
        "addressing": coprime.Config(sizes=(6, 5), operation="concat").build(Numbering(ROWS))
    },
    "features": {
        "addressing": (
            quotient_remainder.Config(sizes=(6, 4), operation="features").build(Numbering(ROWS))
        )
    },
    "path": {"addressing": path.Config(rows=7).build(Numbering(ROWS))},
    "projection": {"addressing": MixedDimension(ROWS, (2,))},
    "blocks": {"addressing": MixedDimension(ROWS, (6, 3, 2), (4, 11))},
    "scattered": {},
}
ROUNDED: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp16": {"format": fp16.Config()},
    "bf16": {"format": bf16.Config()},
    "split_bf16": {"format": split_bf16.Config()},
    "int8": {"format": int8.Config()},
    "int4": {"format": int4.Config()},
    "mxfp8": {"format": mxfp8.Config()},
    "mxfp4": {"format": mxfp4.Config()},
    "state": {"format": bf16.Config(), "state": "bf16", "rule": adagrad.Config(lr=0.3)},
}
PLANS: dict[str, Callable[[int, int], Layout]] = {
    "data_parallel": lambda size, local: data_parallel(),
    "table_wise": lambda size, local: table_wise(size - 1),
    "row_wise": lambda size, local: row_wise(size),
    "column_wise": lambda size, local: column_wise((0, 1)),
    "table_row_wise": lambda size, local: table_row_wise(0, local),
}
FEATURES = [Feature(name="a", table="t"), Feature(name="b", table="t", pooling="mean"),
            Feature(name="c", table="t", pooling="none"), Feature(name="d", table="u")]  # fmt: skip


def sized(members: Iterable[str]) -> list[Any]:
    """Members, layouts and numbers of ranks: quickly with 2 or with 3 by turns."""
    each = itertools.product(enumerate(members), enumerate(PLANS), (2, 3, 4))
    return [
        pytest.param(
            member, layout, size, marks=() if size == 2 + (i + j) % 2 else pytest.mark.slow
        )
        for (i, member), (j, layout), size in each
    ]


def tables_of(member: str, placement: Placement = ON_CPU) -> EmbeddingTables:
    rule = {"rule": sgd.Config(lr=0.3) if member in ROUNDED else RULE}
    spec = {"addressing": Direct(ROWS), **rule, **TABLES.get(member, {}), **ROUNDED.get(member, {})}
    # two parts of columns: 32, and a block with a short one
    dim = 65 if member.startswith("mx") else 6
    specs = [
        TableSpec(name="t", dim=dim, **spec),
        TableSpec(name="u", dim=4, addressing=Direct(ROWS), **rule),
    ]
    features = [
        replace(f, pooling="sum") if f.pooling == "mean" and member in ROUNDED else f
        for f in FEATURES
    ]
    return EmbeddingTables(specs, features, seed=1, mode="deferred", placement=placement)


def ids_of(seed: int, weighted: bool) -> KeyedJagged:
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (4 * 5,), generator=random)
    count = int(lengths.sum())
    return KeyedJagged(
        keys=("a", "b", "c", "d"),
        values_N=torch.randint(0, ROWS, (count,), generator=random),
        lengths=lengths,
        weights_N=torch.rand(count, generator=random) if weighted else None,
    )


def vectors_of(
    tables: EmbeddingTables, seed: int, weighted: bool, whole: bool = False
) -> list[Tensor]:
    """The vectors of a batch, whose gradients are on their way to the rows."""
    found = tables(ids_of(seed, weighted))
    out = [v.values_N if isinstance(v, Jagged) else v for v in found.values()]
    (
        sum((v * cases.upstream(v.shape, seed + i, whole)).sum() for i, v in enumerate(out))
        + torch.zeros(())
    ).backward()
    return [v.detach().clone() for v in out]


def sharded(world: World, member: str, layout: str, store: bool, weighted: bool) -> dict[str, Any]:
    """Some steps of a rank: its vectors, and the chunks of its rows."""
    tables = tables_of(member, UNALLOCATED)
    names = [component.name for spec in tables.specs for component in spec.components]
    plan = dict.fromkeys(names, PLANS[layout](world.size, world.local_size))
    shard(tables, plan, world, Codecs(), Placement(store=Scattered if store else None))
    found = []
    for step in range(STEPS):
        tables.prefetch(ids_of(100 * step + world.rank, False)) if step == 1 else None
        found.append(vectors_of(tables, 100 * step + world.rank, weighted, member in ROUNDED))
        for gradient in (p.grad for p in tables.parameters() if p.grad is not None):
            world.all_sum("dense", gradient)
        tables.update()
    return {"vectors": found, "chunks": cases.plain(tables.chunks(100))}


def single(
    member: str, size: int, weighted: bool
) -> tuple[list[list[list[Tensor]]], EmbeddingTables]:
    """One process with the ranks' batches one after the other."""
    tables, found = tables_of(member), []
    for step in range(STEPS):
        found.append([vectors_of(tables, 100 * step + rank, weighted) for rank in range(size)])
        tables.update()
    return found, tables


@pytest.mark.parametrize(("member", "layout", "size"), sized(TABLES))
def test_a_second_member_is_sharded_as_it_is_on_one_rank(
    ranks: Callable[[int], Pool], member: str, layout: str, size: int
) -> None:
    weighted = layout in ("row_wise", "data_parallel")
    got = ranks(size).run(sharded, member, layout, member == "scattered", weighted)
    want, whole = single(member, size, weighted)
    by_columns = layout == "column_wise"  # each part then has a sum of squares of its own
    for step in range(1 if by_columns else STEPS):
        for rank in range(size):
            for mine, its in zip(got[rank]["vectors"][step], want[step][rank], strict=True):
                torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-6)
    seen: dict[str, int] = {}
    for table, rows, columns, fields in (chunk for of_rank in got for chunk in of_rank["chunks"]):
        expected = whole.record(table).fields
        assert set(fields) == set(expected)
        seen[table] = seen.get(table, 0) + (rows[1] - rows[0]) * (columns[1] - columns[0])
        assert torch.equal(fields["touched"], expected["touched"][slice(*rows)]) or by_columns
        if not by_columns:
            wanted = expected["weight"][slice(*rows), slice(*columns)]
            assert fields["weight"].dtype == wanted.dtype
            torch.testing.assert_close(fields["weight"], wanted, rtol=1e-5, atol=1e-6)
    assert seen == {r.component.name: r.rows * r.dim for r in whole.all_records()}


@pytest.mark.parametrize(("member", "layout", "size"), sized(ROUNDED))
def test_rows_are_rounded_to_the_same_bits_on_any_number_of_ranks(
    ranks: Callable[[int], Pool], member: str, layout: str, size: int
) -> None:
    """Gradients are whole numbers, whose sums do not depend on their order."""
    if member.startswith("int") and layout == "column_wise":
        pytest.skip("a row with scales is not cut by columns")
    got = ranks(size).run(sharded, member, layout, False, False)
    whole = tables_of(member)
    for step in range(STEPS):
        parts = [ids_of(100 * step + rank, False) for rank in range(size)]
        found = whole(joined(parts))
        total = torch.zeros(())
        for i, v in enumerate(found.values()):
            out, of = (v.values_N, "ids") if isinstance(v, Jagged) else (v, "samples")
            sizes = [
                part["c"].values_N.numel() if of == "ids" else part.batch_size for part in parts
            ]
            up = [
                cases.upstream(torch.Size([n, out.shape[1]]), 100 * step + r + i, True)
                for r, n in enumerate(sizes)
            ]
            total = total + (out * torch.cat(up)).sum()
        total.backward()
        whole.update()
    again = tables_of(member)
    for table, rows, columns, fields in (chunk for of_rank in got for chunk in of_rank["chunks"]):
        again.load_chunk(Chunk(table=table, rows=rows, columns=columns, fields=fields))
        record = whole.record(table)
        for name, field in record.component.fields.items():
            expected = field.part(record.fields[name][slice(*rows)], slice(*columns), record.dim)
            assert torch.equal(fields[name], expected) or (
                layout == "column_wise" and field.across == "max"
            ), name
    for record in whole.all_records():
        same = again.record(record.name).fields
        assert all(torch.equal(same[name], values) for name, values in record.fields.items())


def joined(parts: list[KeyedJagged]) -> KeyedJagged:
    """The batches of all ranks as one: for each key the samples of rank 0, then those of rank 1."""
    keys = parts[0].keys
    return KeyedJagged(
        keys=keys,
        values_N=torch.cat([part[key].values_N for key in keys for part in parts]),
        lengths=torch.cat([part[key].lengths_B for key in keys for part in parts]),
    )


@pytest.mark.parametrize("layout", PLANS)
def test_a_store_changes_no_bit_on_many_ranks(ranks: Callable[[int], Pool], layout: str) -> None:
    plain, other = (
        ranks(3).run(sharded, "scattered", layout, store, True) for store in (False, True)
    )
    for one, two in zip(plain, other, strict=True):
        for mine, its in zip(one["vectors"], two["vectors"], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, its, strict=True))
        for (*place, fields), (*where, same) in zip(one["chunks"], two["chunks"], strict=True):
            assert place == where
            assert all(torch.equal(fields[name], same[name]) for name in fields)


DIMS, EDGES, BAGS = (6, 3, 2), (4, 11), [5, 3, 4, 6]  # of the blocks; samples of each rank


def blocks_of(rank: int) -> KeyedJagged:
    """Bags of a rank, of two features."""
    random = torch.Generator().manual_seed(rank)
    lengths = torch.randint(0, 4, (2 * BAGS[rank],), generator=random)
    values_N = torch.randint(0, ROWS, (int(lengths.sum()),), generator=random)
    return KeyedJagged(keys=("a", "b"), values_N=values_N, lengths=lengths)


def sent_by(world: World, layout: str) -> dict[tuple[str, str], int]:
    """The bytes of a step of tables with blocks of several dims."""
    spec = TableSpec(name="t", dim=6, addressing=MixedDimension(ROWS, DIMS, EDGES), rule=RULE)
    features = [Feature(name="a", table="t"), Feature(name="b", table="t", pooling="mean")]
    tables = EmbeddingTables([spec], features, placement=UNALLOCATED)
    layouts = {part.name: PLANS[layout](world.size, world.local_size) for part in spec.components}
    shard(tables, layouts, world, Codecs())
    before = world.meter.bytes.copy()
    torch.as_tensor(sum(v.sum() for v in tables(blocks_of(world.rank)).values())).backward()
    tables.update()
    return dict(world.meter.bytes - before)


@pytest.mark.parametrize("size", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("layout", ["table_wise", "row_wise", "column_wise"])
def test_bytes_of_blocks_are_those_of_their_dims(
    ranks: Callable[[int], Pool], layout: str, size: int
) -> None:
    """A pooled vector travels with the d columns of its block, and no id travels to a block that
    has no row for it.
    """
    got = ranks(size).run(sent_by, layout)
    parts = TableSpec(name="t", dim=6, addressing=MixedDimension(ROWS, DIMS, EDGES)).components
    plan_of = {part.name: PLANS[layout](size, HOSTS[size]) for part in parts}
    shards = [
        s for part in parts for s in plan_of[part.name].shards(part.name, part.rows, part.dim)
    ]
    for rank, sent in enumerate(got):
        want = {"vectors": 0, "gradients": 0}
        for one in shards:  # for each of two features
            columns = one.columns[1] - one.columns[0]
            others = sum(BAGS[:size]) - BAGS[rank]
            want["vectors"] += 2 * 4 * columns * others * (one.rank == rank)
            want["gradients"] += 2 * 4 * columns * BAGS[rank] * (one.rank != rank)
        for what, count in want.items():
            assert (
                sum(n for (name, link), n in sent.items() if name == what and link != "self")
                == count
            )
    ids = [blocks_of(rank).values_N for rank in range(size)]
    rows = 0
    for part, (first, end) in zip(parts, pairwise((0, *EDGES, ROWS)), strict=True):
        layout_of = plan_of[part.name]
        rows += layout_of.columns * sum(int(((n >= first) & (n < end)).sum()) for n in ids)
        rows += 2 * len(layout_of.ranks) * sum(BAGS[:size])  # lengths
    assert sum(n for sent in got for (name, _), n in sent.items() if name == "ids") == 4 * rows


def refused(world: World) -> list[str]:
    found = []
    formats: dict[int, Any] = {4: Scaled(), 48: mxfp8.Config()}
    for dim, format in formats.items():
        spec = TableSpec(name="t", dim=dim, addressing=Direct(9), format=format)
        tables = EmbeddingTables([spec], [Feature(name="a", table="t")], placement=UNALLOCATED)
        with pytest.raises(UserError) as error:
            shard(tables, {"t": column_wise((0, 1))}, world, Codecs())
        found.append(str(error.value))
    return found


def test_a_layout_that_a_format_forbids_is_refused(ranks: Callable[[int], Pool]) -> None:
    for told in ranks(2).run(refused):
        assert told == [
            f"plan: table 't' is cut by columns, and {why}; cut it by rows, or leave it whole"
            for why in (
                "'scale' is of a whole row",
                "'weight' has blocks of 32 columns, not whole in 0:24",
            )
        ]


def test_a_plan_is_of_components() -> None:
    components = [c for spec in tables_of("product").specs for c in spec.components]
    found = plan("row_wise", components, Grid(1, HOSTS[2]))
    assert list(found) == ["t.quotient", "t.remainder", "u"]
