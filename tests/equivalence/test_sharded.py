"""Sharded = single: the tables alone, at their boundary."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from sparrow.core import KeyedJagged
from sparrow.distributed import Codec, World
from sparrow.distributed.codecs import cast, mx
from sparrow.kernels.rules import RowRule, adagrad, adam, rowwise_adagrad, rowwise_adam, sgd
from sparrow.sharding import (
    Layout,
    column_wise,
    data_parallel,
    grid,
    hosts_row_wise,
    row_wise,
    table_column_wise,
    table_row_wise,
    table_wise,
)  # fmt: skip
from tests.equivalence import cases
from tests.equivalence.conftest import HOSTS
from tests.equivalence.pool import Pool

pytestmark = pytest.mark.multi
RULES: dict[str, RowRule] = {
    "sgd": sgd.Config(lr=0.1),
    "rowwise_adagrad": rowwise_adagrad.Config(),
    "adagrad": adagrad.Config(),
    "adam": adam.Config(),
    "rowwise_adam": rowwise_adam.Config(),
}
LAYOUTS: dict[str, Callable[[int, int], Layout]] = {  # of ranks, ranks a host
    "data_parallel": lambda size, local: data_parallel(),
    "table_wise": lambda size, local: table_wise(size - 1),
    "row_wise": lambda size, local: row_wise(size),
    "column_wise": lambda size, local: column_wise(tuple(range(min(size, min(cases.DIMS))))),
    "table_row_wise": lambda size, local: table_row_wise(size // local - 1, local),
    "table_column_wise": lambda size, local: table_column_wise(0, local),
    "grid": lambda size, local: grid(tuple(range(size // local)), local),
    "hosts_row_wise": lambda size, local: hosts_row_wise(tuple(range(size // local))[::-1], local),
}
MODES = ("fused", "deferred", "off")
FP32 = cast.Config()
BATCHES = [5, 3, 0, 6, 1]  # samples of each rank: uneven, and none


def pairwise(**choices: list[Any]) -> list[dict[str, Any]]:
    """Cases in which every two choices meet: greedily, each case takes as many new pairs as it
    can.
    """
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
                        ((min(c, o), z if c < o else v, max(c, o), v if c < o else z) in left)
                        for o, v in best.items()
                    ),
                )
        left -= {(i, best[i], j, best[j]) for i, j in itertools.combinations(sorted(best), 2)}
        found.append({names[c]: choices[names[c]][best[c]] for c in sorted(best)})
    return found


def single(
    rule: RowRule,
    poolings: tuple[str, ...],
    mode: str,
    batches: list[int],
    most: int,
    weighted: bool,
    steps: int,
    unique: bool = False,
    only: tuple[str, tuple[int, int]] | None = None,
    scale: float = 1.0,
) -> tuple[Any, dict[str, Any]]:
    """One process with the ranks' batches one behind the other. only: a table that has only these
    columns.
    """
    whole = cases.tables(rule, poolings, mode)
    if only:
        table, (left, right) = only
        narrow = tuple(
            right - left if name == table else dim
            for name, dim in zip("abc", cases.DIMS, strict=True)
        )
        begun, whole = whole, cases.tables(rule, poolings, mode, narrow)
        whole.record(table).weight.copy_(begun.record(table).weight[:, left:right])
    found = []
    for step in range(steps):
        made = cases.grouped if unique else cases.ids
        parts = [
            made(100 * step + rank, count, most, weighted).expanded()
            for rank, count in enumerate(batches)
        ]
        out = cases.flat(whole(joined(parts)))
        sizes = [
            {
                n: part[f].values_N.numel() if p == "none" else count
                for n, f, p in zip(out, out, poolings, strict=True)
            }
            for part, count in zip(parts, batches, strict=True)
        ]
        found.append({name: v.detach().split([s[name] for s in sizes]) for name, v in out.items()})
        loss = torch.zeros(())
        for i, (name, v) in enumerate(out.items()):
            dim = cases.DIMS["abc".index("abac"[i])]
            shapes = [torch.Size([size[name], dim]) for size in sizes]
            grads = [
                cases.upstream(shape, 7 * step + 31 * r + i, unique)
                for r, shape in enumerate(shapes)
            ]
            grad = torch.cat(grads)
            if only and "abac"[i] == only[0]:
                grad = grad[:, slice(*only[1])]
            loss = loss + (v * grad * scale).sum()
        if loss.requires_grad:
            loss.backward()
        whole.update()
    return found, {record.name: record.fields for record in whole.all_records()}


def joined(parts: list[KeyedJagged]) -> KeyedJagged:
    each = [[part[key] for part in parts] for key in parts[0].keys]
    flat = [ids for of_key in each for ids in of_key]
    weighted = parts[0].weights_N is not None
    return KeyedJagged(
        keys=parts[0].keys,
        values_N=torch.cat([i.values_N for i in flat]),
        lengths=torch.cat([i.lengths_B for i in flat]),
        weights_N=torch.cat([i.weights_N for i in flat]) if weighted else None,  # type: ignore[misc]
    )


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


def by_turns(*choices: Iterable[Any]) -> list[Any]:
    """All that can be chosen; quick are every other one, in which each choice is met."""
    each = itertools.product(*map(enumerate, choices))
    return [
        pytest.param(
            *(value for _, value in case),
            marks=pytest.mark.slow if sum(place for place, _ in case) % 2 else (),
        )
        for case in each
    ]


@pytest.mark.parametrize(
    ("layout", "size"),
    [
        *by_turns(LAYOUTS, (2, 3, 4, 5)),
        *(pytest.param(layout, 8, marks=pytest.mark.slow) for layout in LAYOUTS),
    ],
)
def test_one_id_a_bag(ranks: Callable[[int], Pool], layout: str, size: int) -> None:
    """Where nothing is added up in another order, bits are the same."""
    pool = ranks(size)
    plan = dict.fromkeys("abc", LAYOUTS[layout](size, HOSTS[size]))
    rule, poolings = (
        RULES["sgd" if "column" in layout or layout == "grid" else "rowwise_adagrad"],
        ("sum", "mean", "sum", "none"),
    )
    batches = (2 * BATCHES)[:size]
    got = pool.run(cases.train, plan, rule, poolings, "fused", batches, 1, False, 3)
    assert_same(
        got, single(rule, poolings, "fused", batches, 1, False, 3), exact=layout != "data_parallel"
    )


MIXED = {"a": "row_wise", "b": "table_wise", "c": "table_row_wise"}  # roads side by side
CASES = pairwise(
    layout=[*LAYOUTS, "mixed"], rule=list(RULES),
    poolings=[("sum", "mean", "none", "sum"), ("mean", "sum", "sum", "none"), ("none",) * 4],
    mode=["fused", "deferred", "off"], weighted=[False, True], most=[1, 6], size=[2, 3, 4, 5],
)  # fmt: skip


def plan_of(layout: str, size: int) -> dict[str, Layout]:
    named = MIXED if layout == "mixed" else dict.fromkeys("abc", layout)
    return {table: LAYOUTS[kind](size, HOSTS[size]) for table, kind in named.items()}


def check(pool: Pool, case: dict[str, Any], ahead: bool = False, unique: bool = False) -> list[Any]:
    """Three steps on all ranks against one process, which never has unique rows; gives what the
    ranks found.
    """
    size, rule = case["size"], RULES[case["rule"]]
    arguments = (
        rule,
        case["poolings"],
        case["mode"],
        BATCHES[:size],
        case["most"],
        case["weighted"],
        3,
    )
    plan = plan_of(case["layout"], size)
    got = pool.run(cases.train, plan, *arguments, (FP32, FP32), ahead, unique)
    want = single(*arguments, unique)
    cut = any(layout.columns > 1 for layout in plan.values())
    whole_bags = (
        case["layout"] in ("table_wise", "column_wise", "table_column_wise") or case["most"] == 1
    )
    # whose gradients add up alike in any order
    exact = whole_bags and (case["layout"] != "data_parallel" or unique)
    if cut and "rowwise" in case["rule"] and case["mode"] != "off":
        assert_same_by_part(got, (*arguments, unique), exact)
    else:
        assert_same(got, want, exact)
    return got


def assert_same_by_part(got: list[dict[str, Any]], arguments: tuple[Any, ...], exact: bool) -> None:
    """With a rule that keeps a number a row, a column part learns as a table that has only these
    columns.
    """
    for table, columns in {
        (table, columns) for of_rank in got for table, _, columns, _ in of_rank["chunks"]
    }:
        vectors, fields = single(*arguments, only=(table, columns))
        names = {f"f{i + 1}" for i, of in enumerate("abac") if of == table}
        cut, alone = slice(*columns), (0, columns[1] - columns[0])
        mine = []
        for of_rank in got:
            steps = [
                {n: v[:, cut] for n, v in step.items() if n in names} for step in of_rank["vectors"]
            ]
            chunks = [
                (t, r, alone, f) for t, r, c, f in of_rank["chunks"] if (t, c) == (table, columns)
            ]
            mine.append({"vectors": steps, "chunks": chunks})
        assert_same(mine, (vectors, {table: fields[table]}), exact)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_sharded_is_single(ranks: Callable[[int], Pool], case: dict[str, Any]) -> None:
    check(ranks(case["size"]), case)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [*LAYOUTS, "mixed"])
@pytest.mark.parametrize("rule", RULES)
def test_every_combination(ranks: Callable[[int], Pool], layout: str, rule: str) -> None:
    poolings = [*itertools.product(("sum", "mean"), repeat=2)]
    for p, mode, weighted, most, size in itertools.product(
        poolings, MODES, (False, True), (1, 6), (2, 4)
    ):
        case = {
            "layout": layout,
            "rule": rule,
            "poolings": (*p, "none", "sum"),
            "mode": mode,
            "weighted": weighted,
        }
        check(ranks(size), {**case, "most": most, "size": size})


def test_ids_may_be_sent_ahead(ranks: Callable[[int], Pool]) -> None:
    check(ranks(4), {**CASES[0], "layout": "mixed", "mode": "fused", "size": 4}, ahead=True)


@pytest.mark.parametrize("layout", ["row_wise", "hosts_row_wise"])
def test_a_step_leaves_no_batch_behind(ranks: Callable[[int], Pool], layout: str) -> None:
    plan = dict.fromkeys("abc", LAYOUTS[layout](4, HOSTS[4]))
    arguments = (plan, RULES["sgd"], ("sum", "mean", "none", "sum"), "fused", [3] * 4, 6, False)
    assert ranks(4).run(cases.in_flight_after, 3, *arguments) == [0] * 4


@pytest.mark.parametrize(
    ("layout", "rule"),
    by_turns(("column_wise", "table_column_wise", "grid"), ("rowwise_adagrad", "rowwise_adam")),
)
def test_a_column_part_learns_as_a_table_of_its_own(
    ranks: Callable[[int], Pool], layout: str, rule: str
) -> None:
    """One number a row for each part, over steps: those of a table that has only these columns."""
    for poolings, most in ((("sum", "mean", "sum", "sum"), 1), (("mean", "sum", "none", "sum"), 6)):
        case = {
            "layout": layout,
            "rule": rule,
            "mode": "fused",
            "weighted": most > 1,
            "most": most,
            "size": 4,
        }
        check(ranks(4), {**case, "poolings": poolings})


BYTES = pairwise(
    layout=[name for name in LAYOUTS if name != "data_parallel"],
    codec=["fp32", "bf16"],
    most=[1, 10],
    pooling=["sum", "mean"],
    weighted=[False, True],
    size=[3, 4, 5],
)


@pytest.mark.parametrize("case", BYTES, ids=lambda case: "-".join(map(str, case.values())))
def test_bytes_are_those_of_the_formula(ranks: Callable[[int], Pool], case: dict[str, Any]) -> None:
    """Counted from what collectives were handed, against what the layout must send."""
    size, most, weighted = case["size"], case["most"], case["weighted"]
    local, number, batches = (
        HOSTS[size],
        {"fp32": 4, "bf16": 2}[case["codec"]],
        [5, 3, 4, 6, 2][:size],
    )
    plan, both = plan_of(case["layout"], size), (cast.Config(dtype=case["codec"]),) * 2
    got = ranks(size).run(
        cases.train,
        plan,
        RULES["sgd"],
        (case["pooling"],) * 4,
        "fused",
        batches,
        most,
        weighted,
        1,
        both,
    )
    for rank, of_rank in enumerate(got):
        sent = {key: n for key, n in of_rank["bytes"].items() if key[1] != "self" and n}
        ours = {
            key: n for key, n in sent.items() if not key[0].startswith(("ids", "sizes", "weights"))
        }
        through_host = case["layout"] in ("table_row_wise", "grid", "hosts_row_wise")
        want = (sums_sent if through_host else vectors_sent)(plan, rank, batches, local, number)
        assert ours == {key: n for key, n in want.items() if n}
    parts = [cases.ids(rank, count, most, weighted) for rank, count in enumerate(batches)]
    layouts = [plan[table] for table in "abac"]
    lengths = sum(batches) * sum(len(layout.ranks) for layout in layouts)
    rows = sum(
        part[key].values_N.numel() * layouts[k].columns
        for part in parts
        for k, key in enumerate(part.keys)
    )
    total = Counter[str]()
    for (what, _), n in itertools.chain.from_iterable(of_rank["bytes"].items() for of_rank in got):
        total[what] += n
    assert total["ids"] == 4 * (lengths + rows)
    assert total["weights"] == 4 * rows * weighted


def vectors_sent(
    plan: dict[str, Layout], rank: int, batches: list[int], local: int, number: int
) -> Counter[tuple[str, str]]:
    """Each shard's columns to every rank that asked, for each of its samples, whatever a bag
    holds.
    """
    want = Counter[tuple[str, str]]()
    for table in "abac":
        place = "abc".index(table)
        for shard in plan[table].shards(table, cases.ROWS[place], cases.DIMS[place]):
            bytes_each = (shard.columns[1] - shard.columns[0]) * number
            for other in set(range(len(batches))) - {rank}:
                link = "host" if other // local == rank // local else "network"
                want["vectors", link] += (shard.rank == rank) * batches[other] * bytes_each
                want["gradients", link] += (shard.rank == other) * batches[rank] * bytes_each
    return want


def sums_sent(
    plan: dict[str, Layout], rank: int, batches: list[int], local: int, number: int
) -> Counter[tuple[str, str]]:
    """Partial sums within the host, for the samples of each local rank everywhere; then one sum to
    each other host.
    """
    hosts, (host, at) = len(batches) // local, divmod(rank, local)
    widths = [0] * hosts  # of what a host has, over features
    for table in "abac":
        place = "abc".index(table)
        for shard in plan[table].shards(table, cases.ROWS[place], cases.DIMS[place])[::local]:
            widths[shard.rank // local] += shard.columns[1] - shard.columns[0]
    of_local = [sum(batches[h * local + i] for h in range(hosts)) for i in range(local)]  # samples
    return Counter({
        ("partial sums", "host"): widths[host] * (sum(of_local) - of_local[at]) * number,
        ("sums", "network"): widths[host] * (of_local[at] - batches[rank]) * number,
        ("gradients of sums", "network"): (sum(widths) - widths[host]) * batches[rank] * number,
        ("gradients of partial sums", "host"): widths[host] * of_local[at] * (local - 1) * number,
    })  # fmt: skip


def test_a_codec_of_any_size(ranks: Callable[[int], Pool]) -> None:
    """Blocks whose bytes depend on their numbers travel with their sizes, and nothing else
    changes.
    """
    rule, poolings = RULES["rowwise_adagrad"], ("sum", "mean", "none", "sum")
    for layout in ("mixed", "row_wise", "grid"):
        plain, packed = (
            ranks(4).run(
                cases.train,
                plan_of(layout, 4),
                rule,
                poolings,
                "fused",
                BATCHES[:4],
                6,
                True,
                3,
                codecs,
            )
            for codecs in ((FP32, FP32), (cases.Sparse(), cases.Sparse()))
        )
        for one, other in zip(plain, packed, strict=True):
            for mine, theirs in zip(one["vectors"], other["vectors"], strict=True):
                assert all(torch.equal(values, theirs[name]) for name, values in mine.items())
            for (*_, mine), (*_, theirs) in zip(one["chunks"], other["chunks"], strict=True):
                assert all(torch.equal(values, theirs[name]) for name, values in mine.items())
            assert one["bytes"] != other["bytes"]


CHANGES = (
    ("row_wise", "column_wise"), ("grid", "mixed"), ("data_parallel", "grid"), ("mixed", "row_wise"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("change", "sizes"),
    [
        *by_turns(CHANGES, ((4, 2), (2, 4), (4, 1))),
        *(pytest.param(change, (4, 8), marks=pytest.mark.slow) for change in CHANGES),
    ],
)
def test_a_checkpoint_fits_any_plan(
    ranks: Callable[[int], Pool], tmp_path: Path, change: tuple[str, str], sizes: tuple[int, int]
) -> None:
    before, after = change
    rule = RULES[
        "sgd" if "grid" in (before, after) or after == "column_wise" else "rowwise_adagrad"
    ]
    saved = ranks(sizes[0]).run(cases.save, plan_of(before, sizes[0]), rule, str(tmp_path))
    if sizes[1] == 1:
        loaded = [cases.load(World(), dict.fromkeys("abc", data_parallel()), rule, str(tmp_path))]
    else:
        loaded = ranks(sizes[1]).run(cases.load, plan_of(after, sizes[1]), rule, str(tmp_path))
    one, other = (whole(of_ranks, rule) for of_ranks in (saved, loaded))
    for table, fields in one.items():
        for name, values in fields.items():
            assert torch.equal(values, other[table][name]), (table, name)


@pytest.mark.parametrize("rule", ["rowwise_adagrad", "rowwise_adam"])
def test_what_a_rule_keeps_once_a_row_becomes_the_mean_of_column_parts(
    ranks: Callable[[int], Pool], tmp_path: Path, rule: str
) -> None:
    """Of a checkpoint whose column parts have learnt apart; weights and marks keep their bits."""
    saved = ranks(4).run(cases.save, plan_of("column_wise", 4), RULES[rule], str(tmp_path))
    loaded = whole(
        ranks(4).run(cases.load, plan_of("row_wise", 4), RULES[rule], str(tmp_path)), RULES[rule]
    )
    means = {t: {n: torch.zeros_like(v) for n, v in fields.items()} for t, fields in loaded.items()}
    for table, rows, columns, fields in itertools.chain.from_iterable(saved):
        share = (columns[1] - columns[0]) / means[table]["weight"].shape[1]
        for name, values in fields.items():
            if values.dim() > 1:
                means[table][name][slice(*rows), slice(*columns)] = values
            elif name == "touched":
                means[table][name][slice(*rows)] |= values
            else:
                means[table][name][slice(*rows)] += share * values
    apart = False
    for table, fields in loaded.items():
        for name, values in fields.items():
            if values.dim() > 1 or name == "touched":
                assert torch.equal(values, means[table][name])
            else:
                torch.testing.assert_close(values, means[table][name], rtol=1e-5, atol=1e-7)
        first = next(
            f for t, _, c, f in itertools.chain.from_iterable(saved) if t == table and c[0] == 0
        )
        apart |= any(
            not torch.equal(fields[n], v)
            for n, v in first.items()
            if v.dim() == 1 and n != "touched"
        )
    assert apart  # the parts' own numbers differ


def whole(of_ranks: list[Any], rule: RowRule) -> dict[str, dict[str, torch.Tensor]]:
    """The tables of everyone's chunks."""
    fields = {
        record.name: record.fields
        for record in cases.tables(rule, ("sum",) * 4, "fused").all_records()
    }
    for table, rows, columns, found in itertools.chain.from_iterable(of_ranks):
        for name, values in found.items():
            if values.dim() > 1:
                fields[table][name][slice(*rows), slice(*columns)] = values
            else:
                fields[table][name][slice(*rows)] = values
    return fields


UNIQUE = pairwise(
    layout=[*LAYOUTS, "mixed"],
    rule=list(RULES),
    mode=["fused", "deferred"],
    weighted=[False, True],
    most=[1, 6],
    size=[2, 3, 4, 5],
)


@pytest.mark.parametrize("case", UNIQUE, ids=lambda case: "-".join(map(str, case.values())))
def test_unique_rows_between_ranks_are_samples_in_one_process(
    ranks: Callable[[int], Pool], case: dict[str, Any]
) -> None:
    """Sharded and with dedup against neither, with every rule: stored rows that no sample uses are
    not stepped.
    """
    check(ranks(case["size"]), {**case, "poolings": ("sum", "sum", "none", "sum")}, unique=True)


@pytest.mark.parametrize("most", [1, 5])
def test_bytes_are_those_of_unique_rows(ranks: Callable[[int], Pool], most: int) -> None:
    case = {
        "layout": "table_wise",
        "rule": "sgd",
        "poolings": ("sum", "sum", "none", "sum"),
        "mode": "fused",
    }
    got = check(ranks(4), {**case, "most": most, "weighted": False, "size": 4}, unique=True)
    for rank, of_rank in enumerate(got[:3]):  # all tables are on the last rank
        sent = 0
        for step in range(3):
            ids = cases.grouped(100 * step + rank, BATCHES[rank], most, False)
            vectors = (
                ids.stored("f1"),
                ids.stored("f2"),
                ids["f3"].values_N.numel(),
                ids.stored("f4"),
            )
            sent += sum(
                4 * n * cases.DIMS["abc".index(table)]
                for n, table in zip(vectors, "abac", strict=True)
            )
        assert sum(n for (what, _), n in of_rank["bytes"].items() if what == "gradients") == sent


@pytest.mark.parametrize("rule", ["sgd", "rowwise_adagrad", "adam"])
def test_copied_tables_travel_by_what_takes_fewer_bytes(
    ranks: Callable[[int], Pool], rule: str
) -> None:
    """As rows or whole: the same bits on every rank. They use most rows of one table, few of
    another.
    """
    batches = [8, 6, 0, 7]
    best, rows, whole = (
        ranks(4).run(cases.copied, way, RULES[rule], batches, 3) for way in (None, False, True)
    )
    assert all(one["chosen"] == {True, False} for one in best)
    for others in (best, rows, whole):
        for of_rank in others:
            for table, fields in best[0]["all rows"].items():
                for name, values in fields.items():
                    assert torch.equal(values, of_rank["all rows"][table][name]), (table, name)

    def sent(of_rank: dict[str, Any]) -> int:
        return sum(
            n for (what, link), n in of_rank["bytes"].items() if "copied" in what and link != "self"
        )

    assert sum(map(sent, best)) < min(sum(map(sent, rows)), sum(map(sent, whole)))
    want = single(RULES[rule], ("sum", "mean", "none", "sum"), "fused", batches, 3, True, 3)[1]
    for table, fields in want.items():
        torch.testing.assert_close(
            best[0]["all rows"][table]["weight"], fields["weight"], rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("spoilt", [False, True])
def test_the_norm_is_of_everyones_gradients(ranks: Callable[[int], Pool], spoilt: bool) -> None:
    """Of sharded and copied tables; one rank's infinity is everyone's, or they would not all leave
    the step out.
    """
    plan = {**plan_of("row_wise", 4), "b": data_parallel()}
    got = ranks(4).run(cases.norm, plan, RULES["sgd"], spoilt)
    assert got == [got[0]] * 4
    (want,) = [cases.norm(World(), dict.fromkeys("abc", data_parallel()), RULES["sgd"], spoilt, 4)]
    assert got[0] == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize("layout", ["table_wise", "row_wise", "grid"])
def test_small_gradients_arrive_in_fp16(
    ranks: Callable[[int], Pool], layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 1e-9, where fp16's own least number is 6e-8, within the format's error.

    Half a unit of 11 bits is 2**-11 of a gradient. The largest of a message comes to [2**14,
    2**15), so below the normal numbers half their distance, 2**-25, is at most 2**-39 of it, on
    each of the two hops of a grid.
    A row's gradients add up, and so do their errors. fp32 rounds, in both runs, every sum, the
    product with the rate, the weight, and the difference that is compared.
    """
    rule, poolings, fp16 = (
        sgd.Config(lr=1e8),
        ("sum", "mean", "sum", "none"),
        cast.Config(dtype="fp16"),
    )
    arguments = (rule, poolings, "fused", BATCHES[:4], 1, False, 1)
    want = single(*arguments, scale=1e-9)[1]
    begun = cases.tables(rule, poolings, "fused")
    got = ranks(4).run(
        cases.train, plan_of(layout, 4), *arguments, (FP32, fp16), False, False, 1e-9
    )
    upstream, found = cases.upstream, []

    def sizes(*given: Any) -> torch.Tensor:
        found.append(upstream(*given).abs())
        return found[-1]

    monkeypatch.setattr(cases, "upstream", sizes)
    # where rows would go if no two gradients were of different signs
    farthest = single(*arguments, scale=1e-9)[1]
    largest = 1e-9 * rule.lr * max(float(size.max()) for size in found if size.numel())
    # of a row, at most: two features share a table
    lookups, rounding = 2 * sum(BATCHES[:4]), 2.0**-24
    moves = 0.0
    for table, rows, columns, fields in itertools.chain.from_iterable(
        of_rank["chunks"] for of_rank in got
    ):
        part = slice(*rows), slice(*columns)
        before = begun.record(table).weight[part]
        moved, told = fields["weight"] - before, want[table]["weight"][part] - before
        reach = (farthest[table]["weight"][part] - before).abs()
        of_fp32 = 2 * rounding * ((lookups + 3) * reach + before.abs())
        assert (
            (moved - told).abs() <= 2**-11 * reach + 2 * lookups * 2**-39 * largest + of_fp32
        ).all()
        moves = max([moves, *told.abs().flatten().tolist()])
    assert moves > 0.2


def test_codecs_are_chosen_apart(ranks: Callable[[int], Pool]) -> None:
    """Rounded vectors and exact gradients, and the reverse; what is rounded is rounded once."""
    rule, poolings, bf16 = RULES["sgd"], ("sum", "mean", "sum", "none"), cast.Config(dtype="bf16")
    vectors, rows = single(rule, poolings, "fused", BATCHES[:4], 1, False, 1)
    forward, backward = (
        ranks(4).run(
            cases.train,
            plan_of("table_wise", 4),
            rule,
            poolings,
            "fused",
            BATCHES[:4],
            1,
            False,
            1,
            codecs,
        )
        for codecs in ((bf16, FP32), (FP32, bf16))
    )
    for rank, (one, other) in enumerate(zip(forward, backward, strict=True)):
        for name, exact in vectors[0].items():
            assert torch.equal(one["vectors"][0][name], exact[rank].bfloat16().float())
            assert torch.equal(other["vectors"][0][name], exact[rank])
        for table, _, _, fields in one["chunks"]:
            assert torch.equal(fields["weight"], rows[table]["weight"])
        for table, _, _, fields in other["chunks"]:
            torch.testing.assert_close(
                fields["weight"], rows[table]["weight"], rtol=0.02, atol=0.02
            )
            assert not torch.equal(fields["weight"], rows[table]["weight"])


@pytest.mark.parametrize("size", [2, 3])
def test_mx_rounds_the_vectors_of_each_table(ranks: Callable[[int], Pool], size: int) -> None:
    """Messages of rank 0 are one block and those of the last rank a block for each table, and all
    ranks get both.
    """
    rule, poolings, dims = RULES["sgd"], ("sum", "sum", "none", "sum"), (64, 32, 5)
    plan = {"a": table_wise(0), "b": table_wise(0), "c": table_wise(size - 1)}

    def run(*codecs: Codec, before: Codec = FP32) -> Any:
        given = (
            rule,
            poolings,
            "fused",
            BATCHES[:size],
            4,
            False,
            1,
            codecs,
            False,
            False,
            1.0,
            dims,
            before,
        )
        return ranks(size).run(cases.train, plan, *given)

    for name in ("mxfp8", "mxfp4"):
        codec = mx.Config(format=name)  # type: ignore[arg-type]
        plain, forward, backward, rounded = (
            run(FP32, FP32), run(codec, FP32), run(FP32, codec), run(FP32, FP32, before=codec)
        )  # fmt: skip
        moved = 0
        for exact, found, one, other in zip(plain, forward, backward, rounded, strict=True):
            for feature, vectors in exact["vectors"][0].items():
                arrived = codec.decode(codec.encode(vectors, 0, True), *vectors.shape)
                assert torch.equal(found["vectors"][0][feature], arrived)
                assert torch.equal(one["vectors"][0][feature], vectors)
            chunks = (of["chunks"] for of in (exact, found, one, other))
            for (*_, still), (*_, same), (*_, mine), (*_, its) in zip(*chunks, strict=True):
                assert torch.equal(same["weight"], still["weight"])
                assert torch.equal(mine["weight"], its["weight"])
                moved += int((mine["weight"] != still["weight"]).sum())
        assert moved > 100
