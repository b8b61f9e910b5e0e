"""Sharded = single: the tables alone, at their boundary."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sparrow.core import KeyedJagged
from sparrow.distributed import World
from sparrow.distributed.codecs import cast
from sparrow.kernels.rules import RowRule, adagrad, adam, rowwise_adagrad, rowwise_adam, sgd
from sparrow.sharding import (
    Layout,
    column_wise,
    data_parallel,
    grid,
    row_wise,
    table_column_wise,
    table_row_wise,
    table_wise,
)  # fmt: skip
from tests.equivalence import cases
from tests.equivalence.pool import Pool

pytestmark = pytest.mark.multi
RULES: dict[str, RowRule] = {
    "sgd": sgd.Config(lr=0.1), "rowwise_adagrad": rowwise_adagrad.Config(), "adagrad": adagrad.Config(),
    "adam": adam.Config(), "rowwise_adam": rowwise_adam.Config(),
}  # fmt: skip
LAYOUTS: dict[str, Callable[[int, int], Layout]] = {  # of ranks, ranks a host
    "data_parallel": lambda size, local: data_parallel(),
    "table_wise": lambda size, local: table_wise(size - 1),
    "row_wise": lambda size, local: row_wise(size),
    "column_wise": lambda size, local: column_wise(tuple(range(min(size, min(cases.DIMS))))),
    "table_row_wise": lambda size, local: table_row_wise(size // local - 1, local),
    "table_column_wise": lambda size, local: table_column_wise(0, local),
    "grid": lambda size, local: grid(tuple(range(size // local)), local),
}
MODES = ("fused", "deferred", "off")
FP32 = cast.Config()
BATCHES = [5, 3, 0, 6]  # samples of each rank: uneven, and none
EIGHT = pytest.param(8, marks=pytest.mark.slow)


def pairwise(**choices: list[Any]) -> list[dict[str, Any]]:
    """Cases in which every two choices meet: greedily, each case takes as many new pairs as it can."""
    names = list(choices)
    left = {
        (a, x, b, y)
        for a, b in itertools.combinations(range(len(names)), 2)
        for x in range(len(choices[names[a]]))
        for y in range(len(choices[names[b]]))
    }
    found = []
    while left:
        a, x, b, y = min(left)
        best = {a: x, b: y}
        for c in range(len(names)):
            if c not in best:
                best[c] = max(
                    range(len(choices[names[c]])),
                    key=lambda z: sum(
                        ((min(c, o), z if c < o else v, max(c, o), v if c < o else z) in left) for o, v in best.items()
                    ),
                )
        left -= {(i, best[i], j, best[j]) for i, j in itertools.combinations(sorted(best), 2)}
        found.append({names[c]: choices[names[c]][best[c]] for c in sorted(best)})
    return found


def single(
    rule: RowRule, poolings: tuple[str, ...], mode: str, batches: list[int], most: int, weighted: bool, steps: int,
    only: tuple[str, tuple[int, int]] | None = None,
) -> tuple[Any, dict[str, Any]]:  # fmt: skip
    """One process with the ranks' batches one behind the other. only: a table that has only these columns."""
    whole = cases.tables(rule, poolings, mode)
    if only:
        table, (left, right) = only
        narrow = tuple(right - left if name == table else dim for name, dim in zip("abc", cases.DIMS, strict=True))
        begun, whole = whole, cases.tables(rule, poolings, mode, narrow)
        whole.record(table).weight.copy_(begun.record(table).weight[:, left:right])
    found = []
    for step in range(steps):
        parts = [cases.ids(100 * step + rank, count, most, weighted) for rank, count in enumerate(batches)]
        out = cases.flat(whole(joined(parts)))
        sizes = [
            {n: part[f].values_N.numel() if p == "none" else count for n, f, p in zip(out, out, poolings, strict=True)}
            for part, count in zip(parts, batches, strict=True)
        ]
        found.append({name: v.detach().split([s[name] for s in sizes]) for name, v in out.items()})
        loss = torch.zeros(())
        for i, (name, v) in enumerate(out.items()):
            dim = cases.DIMS["abc".index("abac"[i])]
            grads = [cases.upstream(torch.Size([s[name], dim]), 7 * step + 31 * r + i) for r, s in enumerate(sizes)]
            grad = torch.cat(grads)
            if only and "abac"[i] == only[0]:
                grad = grad[:, slice(*only[1])]
            loss = loss + (v * grad).sum()
        if loss.requires_grad:
            loss.backward()
        whole.update()
    return found, {record.name: record.fields for record in whole.all_records()}


def joined(parts: list[KeyedJagged]) -> KeyedJagged:
    each = [[part[key] for part in parts] for key in parts[0].keys]
    flat = [ids for of_key in each for ids in of_key]
    weighted = parts[0].weights_N is not None
    return KeyedJagged(
        keys=parts[0].keys, values_N=torch.cat([i.values_N for i in flat]),
        lengths=torch.cat([i.lengths_B for i in flat]),
        weights_N=torch.cat([i.weights_N for i in flat]) if weighted else None,  # type: ignore[misc]
    )  # fmt: skip


def assert_same(got: list[dict[str, Any]], want: Any, exact: bool, state: bool = True) -> None:
    vectors, fields = want

    def same(a: torch.Tensor, b: torch.Tensor) -> None:
        if exact:
            assert torch.equal(a, b)
        else:
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)

    for rank, of_rank in enumerate(got):
        for step, mine in enumerate(of_rank["vectors"]):
            for name, values in mine.items():
                same(values, vectors[step][name][rank])
    seen = {name: torch.zeros_like(f["weight"]) for name, f in fields.items()}
    for of_rank in got:
        for table, rows, columns, found in of_rank["chunks"]:
            for name, values in found.items():
                if values.dim() > 1:
                    same(values, fields[table][name][slice(*rows), slice(*columns)])
                elif state:
                    same(values, fields[table][name][slice(*rows)])
            seen[table][slice(*rows), slice(*columns)] += 1
    assert all((count == 1).all() for count in seen.values())  # every number is on one rank


@pytest.mark.parametrize("size", [2, 4, EIGHT])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_id_a_bag(ranks: Callable[[int], Pool], size: int, layout: str) -> None:
    """Where nothing is added up in another order, bits are the same."""
    pool = ranks(size)
    plan = dict.fromkeys("abc", LAYOUTS[layout](size, 2))
    rule, poolings = (
        RULES["sgd" if "column" in layout or layout == "grid" else "rowwise_adagrad"],
        ("sum", "mean", "sum", "none"),
    )
    batches = (2 * BATCHES)[:size]
    got = pool.run(cases.train, plan, rule, poolings, "fused", batches, 1, False, 3)
    assert_same(got, single(rule, poolings, "fused", batches, 1, False, 3), exact=layout != "data_parallel")


MIXED = {"a": "row_wise", "b": "table_wise", "c": "table_row_wise"}  # roads side by side
CASES = pairwise(
    layout=[*LAYOUTS, "mixed"], rule=list(RULES),
    poolings=[("sum", "mean", "none", "sum"), ("mean", "sum", "sum", "none"), ("none",) * 4],
    mode=["fused", "deferred", "off"], weighted=[False, True], most=[1, 6], size=[2, 4],
)  # fmt: skip


def plan_of(layout: str, size: int) -> dict[str, Layout]:
    named = MIXED if layout == "mixed" else dict.fromkeys("abc", layout)
    return {table: LAYOUTS[kind](size, 2) for table, kind in named.items()}


def check(pool: Pool, case: dict[str, Any], ahead: bool = False) -> None:
    size, rule = case["size"], RULES[case["rule"]]
    shared = (case["poolings"], case["mode"])
    got = pool.run(
        cases.train, plan_of(case["layout"], size), rule, *shared, BATCHES[:size], case["most"], case["weighted"], 3,
        *((FP32, FP32), ahead),
    )  # fmt: skip
    cut = case["layout"] in ("column_wise", "table_column_wise", "grid")
    of_rows = "rowwise" in case["rule"]
    want = single(rule, *shared, BATCHES[:size], case["most"], case["weighted"], 3)
    if cut and of_rows and case["mode"] != "off":  # learns by a definition of its own, below; looks up by this one
        for rank, of_rank in enumerate(got):
            for name, values in of_rank["vectors"][0].items():
                torch.testing.assert_close(values, want[0][0][name][rank], rtol=1e-5, atol=1e-6)
        return
    whole_bags = case["layout"] in ("table_wise", "column_wise", "table_column_wise") or case["most"] == 1
    assert_same(got, want, exact=whole_bags and case["layout"] != "data_parallel")


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_sharded_is_single(ranks: Callable[[int], Pool], case: dict[str, Any]) -> None:
    check(ranks(case["size"]), case)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [*LAYOUTS, "mixed"])
@pytest.mark.parametrize("rule", RULES)
def test_every_combination(ranks: Callable[[int], Pool], layout: str, rule: str) -> None:
    poolings = [*itertools.product(("sum", "mean"), repeat=2)]
    for p, mode, weighted, most, size in itertools.product(poolings, MODES, (False, True), (1, 6), (2, 4)):
        case = {"layout": layout, "rule": rule, "poolings": (*p, "none", "sum"), "mode": mode, "weighted": weighted}
        check(ranks(size), {**case, "most": most, "size": size})


def test_ids_may_be_sent_ahead(ranks: Callable[[int], Pool]) -> None:
    check(ranks(4), {**CASES[0], "layout": "mixed", "mode": "fused", "size": 4}, ahead=True)


@pytest.mark.parametrize("layout", ["column_wise", "table_column_wise", "grid"])
def test_a_column_part_learns_as_a_table_of_its_own(ranks: Callable[[int], Pool], layout: str) -> None:
    """One sum of squares a row for each part: that of a table that has only these columns."""
    rule, poolings = RULES["rowwise_adagrad"], ("sum", "mean", "sum", "sum")
    got = ranks(4).run(cases.train, plan_of(layout, 4), rule, poolings, "fused", BATCHES, 1, False, 3)
    parts = {(table, columns) for of_rank in got for table, _, columns, _ in of_rank["chunks"]}
    for table, columns in parts:
        fields = single(rule, poolings, "fused", BATCHES, 1, False, 3, only=(table, columns))[1][table]
        for of_rank in got:
            for name, rows, cut, found in of_rank["chunks"]:
                if (name, cut) == (table, columns):
                    for field, values in found.items():
                        assert torch.equal(values, fields[field][slice(*rows)])


@pytest.mark.parametrize("layout", ["table_wise", "row_wise", "column_wise", "table_column_wise", "table_row_wise"])
@pytest.mark.parametrize("codec", ["fp32", "bf16"])
def test_bytes_are_those_of_the_formula(ranks: Callable[[int], Pool], layout: str, codec: str) -> None:
    """Counted from what collectives were handed, against what the layout must send."""
    size, local, number, batches = 4, 2, {"fp32": 4, "bf16": 2}[codec], [5, 3, 4, 6]
    both = (cast.Config(dtype=codec), cast.Config(dtype=codec))  # type: ignore[arg-type]
    got = ranks(size).run(
        cases.train, plan_of(layout, size), RULES["sgd"], ("sum",) * 4, "fused", batches, 1, False, 1, both
    )
    tables = (("a", 2), ("b", 1), ("c", 1))  # features of each
    widths = dict(zip("abc", cases.DIMS, strict=True))
    plan = plan_of(layout, size)
    for rank, of_rank in enumerate(got):
        host = rank // local
        want = dict.fromkeys(
            [("vectors", "host"), ("vectors", "network"), ("gradients", "host"), ("gradients", "network")], 0
        )
        for other in range(size):
            if other == rank:
                continue
            link = "host" if other // local == host else "network"
            for table, features in tables:
                for shard in plan[table].shards(table, cases.ROWS["abc".index(table)], widths[table]):
                    width = shard.columns[1] - shard.columns[0]
                    if shard.rank == rank:  # vectors to who asked
                        want["vectors", link] += features * batches[other] * width * number
                    if shard.rank == other:
                        want["gradients", link] += features * batches[rank] * width * number
        if layout == "table_row_wise":  # sums within the host, then once to the other
            here = sum(f * widths[t] for t, f in tables if plan[t].ranks[0] // local == host)
            away = sum(f * widths[t] for t, f in tables if plan[t].ranks[0] // local != host)
            beside = sum(batches[h * local + 1 - rank % local] for h in range(2))
            mine = sum(batches[h * local + rank % local] for h in range(2))
            across = (rank + local) % size
            want = {
                ("partial sums", "host"): here * beside * number, ("sums", "network"): here * batches[across] * number,
                ("gradients of sums", "network"): away * batches[rank] * number,
                ("gradients of partial sums", "host"): here * mine * number,
            }  # fmt: skip
        sent = {
            key: n
            for key, n in of_rank["bytes"].items()
            if key[1] != "self" and n and not key[0].startswith(("ids", "sizes"))
        }
        assert sent == {key: n for key, n in want.items() if n}
    layouts = [(features, plan[table]) for table, features in tables]
    lengths = sum(batches) * sum(features * len(layout.ranks) for features, layout in layouts)
    rows = sum(batches) * sum(features * layout.columns for features, layout in layouts)  # one id a bag
    assert sum(n for of_rank in got for (what, _), n in of_rank["bytes"].items() if what == "ids") == 4 * (
        lengths + rows
    )


def test_a_codec_of_any_size(ranks: Callable[[int], Pool]) -> None:
    """Blocks whose bytes depend on their numbers travel with their sizes, and nothing else changes."""
    rule, poolings = RULES["rowwise_adagrad"], ("sum", "mean", "none", "sum")
    for layout in ("mixed", "row_wise", "grid"):
        plain, packed = (
            ranks(4).run(cases.train, plan_of(layout, 4), rule, poolings, "fused", BATCHES, 6, True, 3, codecs)
            for codecs in ((FP32, FP32), (cases.Sparse(), cases.Sparse()))
        )
        for one, other in zip(plain, packed, strict=True):
            for mine, theirs in zip(one["vectors"], other["vectors"], strict=True):
                assert all(torch.equal(values, theirs[name]) for name, values in mine.items())
            for (*_, mine), (*_, theirs) in zip(one["chunks"], other["chunks"], strict=True):
                assert all(torch.equal(values, theirs[name]) for name, values in mine.items())
            assert one["bytes"] != other["bytes"]


@pytest.mark.parametrize(
    ("before", "after"),
    [("row_wise", "column_wise"), ("grid", "mixed"), ("data_parallel", "grid"), ("mixed", "row_wise")],
)
@pytest.mark.parametrize("sizes", [(4, 2), (2, 4), (4, 1), pytest.param((4, 8), marks=pytest.mark.slow)])
def test_a_checkpoint_fits_any_plan(
    ranks: Callable[[int], Pool], tmp_path: Path, before: str, after: str, sizes: tuple[int, int]
) -> None:
    rule = RULES["sgd" if "grid" in (before, after) or after == "column_wise" else "rowwise_adagrad"]
    saved = ranks(sizes[0]).run(cases.save, plan_of(before, sizes[0]), rule, str(tmp_path))
    if sizes[1] == 1:
        loaded = [cases.load(World(), dict.fromkeys("abc", data_parallel()), rule, str(tmp_path))]
    else:
        loaded = ranks(sizes[1]).run(cases.load, plan_of(after, sizes[1]), rule, str(tmp_path))
    one, other = (whole(of_ranks, rule) for of_ranks in (saved, loaded))
    for table, fields in one.items():
        for name, values in fields.items():
            assert torch.equal(values, other[table][name]), (table, name)


def whole(of_ranks: list[Any], rule: RowRule) -> dict[str, dict[str, torch.Tensor]]:
    """The tables of everyone's chunks."""
    fields = {record.name: record.fields for record in cases.tables(rule, ("sum",) * 4, "fused").all_records()}
    for table, rows, columns, found in itertools.chain.from_iterable(of_ranks):
        for name, values in found.items():
            if values.dim() > 1:
                fields[table][name][slice(*rows), slice(*columns)] = values
            else:
                fields[table][name][slice(*rows)] = values
    return fields


@pytest.mark.parametrize("layout", [*LAYOUTS, "mixed"])
@pytest.mark.parametrize("most", [1, 5])
def test_unique_rows_between_ranks_are_samples_in_one_process(
    ranks: Callable[[int], Pool], layout: str, most: int
) -> None:
    """Sharded and with dedup against neither; integers as gradients, which add up to the same in any order."""
    plan, poolings = plan_of(layout, 4), ("sum", "sum", "none", "sum")
    if layout == "mixed":  # of the last group every table is copied
        plan["c"] = data_parallel()
    got = ranks(4).run(cases.dedup, plan, poolings, BATCHES, most)
    tables = cases.tables(RULES["sgd"].__class__(lr=0.5), poolings, "fused")  # type: ignore[call-arg]
    parts = [cases.grouped(rank, count, most).expanded() for rank, count in enumerate(BATCHES)]
    for step in range(2):
        out = cases.flat(tables(joined(parts)))
        sizes = [{key: part[key].values_N.numel() if key == "f3" else n for key in part.keys}
                 for part, n in zip(parts, BATCHES, strict=True)]  # fmt: skip
        loss = torch.zeros(())
        for i, (name, v) in enumerate(out.items()):
            for rank, mine in enumerate(v.detach().split([size[name] for size in sizes])):
                torch.testing.assert_close(got[rank]["vectors"][step][name], mine, rtol=1e-5, atol=1e-6)
                assert most > 1 or torch.equal(got[rank]["vectors"][step][name], mine)
            shapes = [torch.Size([size[name], v.shape[1]]) for size in sizes]
            loss = loss + (v * torch.cat([cases.upstream(s, 31 * r + i).round() for r, s in enumerate(shapes)])).sum()
        loss.backward()
        tables.update()
    for table, rows, columns, fields in itertools.chain.from_iterable(of_rank["chunks"] for of_rank in got):
        want = tables.record(table).weight[slice(*rows), slice(*columns)]
        torch.testing.assert_close(fields["weight"], want, rtol=1e-5, atol=1e-6)
    if layout == "table_wise":  # all on the last rank: ids, vectors and gradients of unique rows alone
        widths = dict(zip("abc", cases.DIMS, strict=True))
        per_row = widths["a"], widths["b"], widths["c"]
        for rank, of_rank in enumerate(got[:3]):
            unique, ids = (BATCHES[rank] + 1) // 2, cases.grouped(rank, BATCHES[rank], most)["f3"].values_N.numel()
            sent = 2 * 4 * (BATCHES[rank] * (per_row[0] + per_row[2]) + unique * per_row[1] + ids * per_row[0])
            assert sum(n for (what, _), n in of_rank["bytes"].items() if what == "gradients") == sent


@pytest.mark.parametrize("spoilt", [False, True])
def test_the_norm_is_of_everyones_gradients(ranks: Callable[[int], Pool], spoilt: bool) -> None:
    """Of sharded and copied tables; one rank's infinity is everyone's, or they would not all leave the step out."""
    plan = {**plan_of("row_wise", 4), "b": data_parallel()}
    got = ranks(4).run(cases.norm, plan, RULES["sgd"], spoilt)
    assert got == [got[0]] * 4
    (want,) = [cases.norm(World(), dict.fromkeys("abc", data_parallel()), RULES["sgd"], spoilt, 4)]
    assert got[0] == pytest.approx(want, rel=1e-6)


def test_codecs_are_chosen_apart(ranks: Callable[[int], Pool]) -> None:
    """Rounded vectors and exact gradients, and the reverse; what is rounded is rounded once."""
    rule, poolings, bf16 = RULES["sgd"], ("sum", "mean", "sum", "none"), cast.Config(dtype="bf16")
    vectors, rows = single(rule, poolings, "fused", BATCHES, 1, False, 1)
    forward, backward = (
        ranks(4).run(cases.train, plan_of("table_wise", 4), rule, poolings, "fused", BATCHES, 1, False, 1, codecs)
        for codecs in ((bf16, FP32), (FP32, bf16))
    )
    for rank, (one, other) in enumerate(zip(forward, backward, strict=True)):
        for name, exact in vectors[0].items():
            assert torch.equal(one["vectors"][0][name], exact[rank].bfloat16().float())
            assert torch.equal(other["vectors"][0][name], exact[rank])
        for table, _, _, fields in one["chunks"]:
            assert torch.equal(fields["weight"], rows[table]["weight"])
        for table, _, _, fields in other["chunks"]:
            torch.testing.assert_close(fields["weight"], rows[table]["weight"], rtol=0.02, atol=0.02)
            assert not torch.equal(fields["weight"], rows[table]["weight"])
