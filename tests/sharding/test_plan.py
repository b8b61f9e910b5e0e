from __future__ import annotations

from collections import Counter
from fractions import Fraction
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from sparrow.core import UserError
from sparrow.embeddings import Component, Direct, EmbeddingTables, Feature, TableSpec
from sparrow.extensions.tiers import ssd
from sparrow.kernels.rules import Regularization, sgd
from sparrow.sharding import Codecs, Layout, column_wise, plan, shard
from sparrow.sharding.plan import FAR, LARGE, MANY, NAMED, ROOM, read, tiers_of

WORLD: Any = SimpleNamespace(size=4, hosts=2, local_size=2, rank=0)
SPECS = [
    Component(name=n, rows=r, dim=16)
    for n, r in [("s", 100), ("m", 40_000), ("l", 10_000_000), ("k", 50_000)]
]


@pytest.mark.parametrize("name", NAMED)
def test_every_number_is_on_one_rank(name: str) -> None:
    for spec in SPECS:
        layout = plan(name, SPECS, WORLD)[spec.name]
        shards = layout.shards(spec.name, spec.rows, spec.dim)
        size = sum((s.rows[1] - s.rows[0]) * (s.columns[1] - s.columns[0]) for s in shards)
        assert size == (0 if layout.is_replicated else spec.rows * spec.dim)
        assert {s.rank for s in shards} <= set(range(4))


def grid(hosts: int, local: int) -> Any:
    return SimpleNamespace(size=hosts * local, hosts=hosts, local_size=local, rank=0)


def test_auto_goes_by_size() -> None:
    found = plan("auto", SPECS, WORLD)
    assert found["s"].is_replicated
    assert found["l"] == Layout(ranks=(0, 1, 2, 3), rows=4, through_host=True)
    assert {len(found["m"].ranks), len(found["k"].ranks)} == {1}
    assert found["m"].ranks != found["k"].ranks


def spec_of(name: str, bytes_table: int) -> Component:
    return Component(name=name, rows=bytes_table // 64, dim=16)


def held(found: dict[str, Layout], sizes: dict[str, int], world: Any) -> list[float]:
    """Bytes of each rank."""
    loads = [0.0] * world.size
    for name, size in sizes.items():
        for rank in found[name].ranks:
            loads[rank] += size / len(found[name].ranks)
    return loads


def travelling(found: dict[str, Layout], world: Any, rank: int) -> Counter[str]:
    """Vectors that come to a rank for a sample with an id in each table, by link; a partial sum is
    one too.
    """
    vectors: Counter[str] = Counter()
    local = world.local_size
    for of in found.values():
        for owner in of.ranks:
            # a host's blocks are added up by its ranks, each for as many samples as it has
            if of.through_host:
                vectors["network" if owner // local != rank // local else "host"] += Fraction(
                    1, local
                )
                vectors["host"] += Fraction(local - 1, local)
            elif owner != rank:
                vectors["network" if owner // local != rank // local else "host"] += 1
    return vectors


@pytest.mark.parametrize("local", [1, 8])
@pytest.mark.parametrize("bytes_table", [2 << 20, 200 << 20, 900 << 20])
def test_equal_tables_stay_where_they_are_as_ranks_grow(local: int, bytes_table: int) -> None:
    """26 of them on 2 to 256 ranks are whole: one vector of each, wherever it is."""
    specs = [spec_of(f"t{i}", bytes_table) for i in range(26)]
    for size in (2, 4, 8, 16, 24, 32, 64, 128, 256):
        world = grid(max(size // local, 1), min(local, size))
        found = plan("auto", specs, world)
        for rank in (0, size - 1):
            vectors = travelling(found, world, rank)
            assert vectors["network"] + vectors["host"] <= 26
        assert {len(of.ranks) for of in found.values()} == {1}


@pytest.mark.parametrize("sigma", [0.1, 1.0, 2.0])
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("small", [0, 500])
def test_of_unequal_tables_only_the_large_ones_are_cut(sigma: float, seed: int, small: int) -> None:
    """26 tables of log-normal sizes, perhaps beside many small ones: those up to the mean stay
    whole.

    On 64 ranks and more they send at most 2.7 times the vectors that whole tables send (12 times
    when only tables up to the mean of a rank stayed whole), whatever the number of ranks.
    """
    random = Random(seed)
    sizes = {
        f"t{i}": max(LARGE + 64, int((300 << 20) * random.lognormvariate(0, sigma))) // 64 * 64
        for i in range(26)
    }
    mean = sum(sizes.values()) / 26
    specs = [spec_of(name, size) for name, size in sizes.items()]
    specs += [spec_of(f"s{i}", 2 << 20) for i in range(small)]
    for hosts in (1, 8, 16, 32):
        world = grid(hosts, 8)
        found = plan("auto", specs, world)
        assert all(len(found[name].ranks) == 1 for name, size in sizes.items() if size <= mean)
        large = {name: found[name] for name in sizes}
        assert sum(travelling(large, world, 0).values()) <= 2.7 * 26
        limit = max(2 * mean, (sum(sizes.values()) + small * (2 << 20)) / world.size)
        # no rank has much more
        assert max(sizes[name] / len(of.ranks) for name, of in large.items()) <= limit


def test_a_table_that_is_too_large_for_a_rank_is_cut_though_all_are_alike() -> None:
    sizes = {f"t{i}": 6 << 30 for i in range(26)}
    specs = [spec_of(name, size) for name, size in sizes.items()]
    for world in (grid(32, 8), grid(1, 64), grid(64, 1)):
        found = plan("auto", specs, world)
        assert all(6 / len(of.ranks) <= ROOM / 2**30 for of in found.values())
        assert max(held(found, sizes, world)) <= 26 * (6 << 30) / world.size + ROOM


@pytest.mark.parametrize("local", [1, 2, 3, 8, 16])
@pytest.mark.parametrize("seed", range(20))
def test_auto_is_balanced(local: int, seed: int) -> None:
    """No rank has more than the mean and the largest part of a table; sizes of every kind.

    A table of size s in k parts goes to the k ranks that have least. If the last of them had more
    than the mean m, so had the other W - k: together more than (W - k + 1) m. But what is left
    without the table is W m - s, and it has k parts because s > (k - 1) m. The same holds of hosts,
    whose ranks have equal loads while tables are cut over them.
    """
    random = Random(seed)
    sizes = {
        f"t{i}": int(2 ** random.uniform(20.1, random.choice([24, 30, 38]))) // 64 * 64
        for i in range(30)
    }
    for hosts in (1, 2, 3, 5, 16, 32):
        world = grid(hosts, local)
        found = plan("auto", [spec_of(name, size) for name, size in sizes.items()], world)
        loads, mean = held(found, sizes, world), sum(sizes.values()) / world.size
        least = FAR if local == 1 and hosts > 1 else LARGE
        assert max(loads) <= mean + max(sizes[name] / len(of.ranks) for name, of in found.items())
        for name, of in found.items():
            of.check(name, world.size, local)
            large = [size for size in sizes.values() if size > least]
            usual = min(2 * sum(large) / len(large), ROOM) if len(large) >= MANY else 0
            limit = max(mean, least, usual)
            assert (len(of.ranks) > 1) == (sizes[name] > limit)
            # over hosts their number is rounded to the nearest: at worst one has what 1.5 should
            assert sizes[name] / len(of.ranks) <= (1.5 if of.through_host else 1) * limit


def test_a_table_is_cut_over_as_few_ranks_as_it_takes() -> None:
    sizes = {"large": 3 << 30, "a": 1 << 30, "b": 1 << 30, "c": 1 << 30, "d": 2 << 30}
    specs = [spec_of(name, size) for name, size in sizes.items()]
    one = plan("auto", specs, grid(1, 4))  # two gigabytes a rank
    assert (one["large"].rows, one["large"].through_host) == (2, False)
    assert {of.rows for name, of in one.items() if name != "large"} == {1}
    several = plan("auto", specs, grid(4, 2))  # one gigabyte a rank
    assert (several["large"].rows, several["d"].rows, several["a"].rows) == (4, 2, 1)
    assert not set(several["large"].ranks) & set(several["d"].ranks)


def test_a_file_says_what_it_wants(tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    file.write_text(
        'default = "row_wise"\n[layouts.l]\nranks = [2, 3]\nrows = 2\nthrough_host = true\n'
    )
    found = plan(str(file), SPECS, WORLD)
    assert found["l"] == Layout(ranks=(2, 3), rows=2, through_host=True)
    assert found["m"].rows == 4
    file.write_text("[layouts.x]\nranks = [0]\n")
    with pytest.raises(UserError, match=r"plan\.toml: no table 'x'"):
        plan(str(file), SPECS, WORLD)


def test_an_impossible_layout() -> None:
    with pytest.raises(UserError, match=r"columns = 1 x rows = 3 are 3 blocks, on ranks \[0, 1\]"):
        Layout(ranks=(0, 1), rows=3)
    with pytest.raises(UserError, match=r"columns = 1 x rows = 2 are 2 blocks, on ranks \[\]"):
        Layout(rows=2)


@pytest.mark.parametrize(
    ("ranks", "rows", "local"),
    [((2, 3), 2, 4), ((1, 2), 2, 2), ((1, 0), 2, 2), ((0, 1, 2, 3), 2, 4), ((0, 1, 3, 2), 4, 2)],
)
def test_a_host_is_all_its_ranks(ranks: tuple[int, ...], rows: int, local: int) -> None:
    whole = EmbeddingTables(
        [TableSpec(name="s", dim=16, addressing=Direct(100))], [Feature(name="f", table="s")]
    )
    of = Layout(ranks=ranks, rows=rows, columns=len(ranks) // rows, through_host=True)
    needs = (
        rf"through_host needs rows = {local} for each of its hosts.*it has rows = {rows} on"
        rf" \[{ranks[0]}, "
    )
    with pytest.raises(UserError, match=f"table 's': {needs}"):
        shard(whole, {"s": of}, grid(4 // local, local), Codecs())


def test_norms_of_whole_rows_need_whole_rows() -> None:
    rule = sgd.Config(regularization=Regularization(max_norm=1.0))
    whole = EmbeddingTables(
        [TableSpec(name="s", dim=16, addressing=Direct(9), rule=rule)],
        [Feature(name="f", table="s")],
    )
    with pytest.raises(UserError, match="table 's' is cut by columns, and its rule bounds norms"):
        shard(whole, {"s": column_wise((0, 1))}, WORLD, Codecs())


def test_an_unknown_plan() -> None:
    with pytest.raises(UserError, match="did you mean 'row_wise'"):
        plan("rowwise", SPECS, WORLD)


def test_tiers_stand_beside_layouts(tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    file.write_text(
        'default = "row_wise"\nlayouts = { s = { ranks = [0] } }\ntiers = { l = { name = "ssd",'
        " bytes = 1000 } }\n"
    )
    assert tiers_of(str(file), ["s", "m", "l"]) == {"l": ssd.Config(bytes=1000)}
    assert plan(str(file), SPECS, WORLD)["s"].ranks == (0,)  # whoever asks for ranks gets them
    assert read("table_wise").default == "table_wise"
    assert tiers_of("auto", ["s"]) == {}


@pytest.mark.parametrize(
    ("tiers", "said"),
    [
        ('x = { name = "ssd" }', "tiers: no table 'x'"),
        ('l = { name = "tape" }', "tape"),
        ('l = { name = "ssd", bytes = 1, fraction = 0.5 }', "choose one"),
    ],
)
def test_tiers_that_cannot_be(tmp_path: Path, tiers: str, said: str) -> None:
    (tmp_path / "plan.toml").write_text(f"tiers = {{ {tiers} }}\n")
    with pytest.raises(UserError, match=f"plan.toml.*{said}"):
        tiers_of(str(tmp_path / "plan.toml"), ["l"])
