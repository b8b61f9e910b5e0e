from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from sparrow import checkpoint, data
from sparrow.apps import placement
from sparrow.apps.generate import generate
from sparrow.apps.placement import divide, options_of, place
from sparrow.core import UserError
from sparrow.embeddings import Component
from sparrow.embeddings.choices import Override
from sparrow.embeddings.sizes import memory_bytes
from sparrow.embeddings.spec import Cache, in_memory
from sparrow.extensions.tiers import disk, reuse, tiering
from sparrow.extensions.tiers.tiering import Cost, Device, Use
from sparrow.kernels.formats import int8
from sparrow.sharding.plan import read
from sparrow.trained.run import Checkpoints, Loop, Run
from sparrow.training import preflight, train
from tests.equivalence.test_ssd import digests
from tests.extensions.tiers.test_curves import curve_of, zipf_batches
from tests.runs import on_disk, small_run

DEVICE = Device(reads_per_s=10_000)
BATCH = 32


def uses_of(tables: int, seed: int = 0) -> dict[str, list[Use]]:
    """Tables of many sizes and skews."""
    chance, found = Random(seed), {}
    for n in range(tables):
        rows, skew = chance.choice([100, 1000, 5000, 20_000]), chance.choice([0.0, 0.7, 1.0, 1.3])
        curve = curve_of(zipf_batches(skew, rows, 30, 200, n), window=5)
        component = Component(name=f"t{n}", rows=rows, dim=chance.choice([4, 16]))
        found[f"t{n}"] = [Use(component=component, curve=curve, lookups=200, is_whole=False)]
    return found


def brute_force(options: dict[str, list[Cost]], budget: int) -> float:
    """The least sum of times of all choices that fit."""
    sums = [(0, 0.0)]
    for costs in options.values():
        sums = [
            (size + c.bytes, ms + c.ms)
            for size, ms in sums
            for c in costs
            if size + c.bytes <= budget
        ]
    return min(ms for _, ms in sums)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.3, 0.6, 1.0])
def test_ten_tables_are_divided_as_by_brute_force(share: float) -> None:
    """share: of what lies between the least bytes and those of all in memory."""
    options = {name: options_of(of, DEVICE, True) for name, of in uses_of(10).items()}
    # 59,049 choices
    few = {name: [costs[0], costs[1], costs[len(costs) // 2]] for name, costs in options.items()}
    least, most = (
        sum(pick(cost.bytes for cost in costs) for costs in few.values()) for pick in (min, max)
    )
    budget = least + int(share * (most - least))
    chosen = divide(few, budget)
    assert sum(cost.bytes for cost in chosen.values()) <= budget
    assert sum(cost.ms for cost in chosen.values()) == pytest.approx(
        brute_force(few, budget), rel=1e-12
    )


def test_all_sizes_of_three_tables_are_divided_as_by_brute_force() -> None:
    options = {name: options_of(of, DEVICE, True) for name, of in uses_of(3, seed=4).items()}
    for share in (0.4, 0.6, 0.9):
        budget = int(share * sum(costs[0].bytes for costs in options.values()))
        chosen = divide(options, budget)
        assert sum(cost.ms for cost in chosen.values()) == pytest.approx(
            brute_force(options, budget), rel=1e-12
        )


def test_what_fits_stays_in_memory() -> None:
    options = {name: options_of(of, DEVICE, True) for name, of in uses_of(10, seed=1).items()}
    chosen = divide(options, sum(costs[0].bytes for costs in options.values()))
    assert {cost.tier.name for cost in chosen.values()} == {"memory"}


def test_of_equal_tables_the_one_with_less_locality_gets_the_memory() -> None:
    """With half of the memory, disk reads of uniform ids are saved first by the whole table, those
    of others by few.
    """
    made = {}
    for name, skew in (("uniform", 0.0), ("skewed", 1.3)):
        curve = curve_of(zipf_batches(skew, 20_000, 100, 2000), window=5)
        component = Component(name=name, rows=20_000, dim=16)
        made[name] = options_of(
            [Use(component=component, curve=curve, lookups=2000, is_whole=False)], DEVICE, True
        )
    chosen = divide(made, int(1.75 * made["uniform"][0].bytes))
    assert chosen["uniform"].tier.name == "memory"
    assert chosen["skewed"].tier.name == "ssd"


def test_one_table_and_none() -> None:
    options = {"t": options_of(uses_of(1)["t0"], DEVICE, True)}
    least = min(cost.bytes for cost in options["t"])
    assert divide(options, least)["t"].bytes == least
    with pytest.raises(UserError, match="budget"):
        divide(options, least - 1)
    assert divide({}, 0) == {}


def test_many_tables_take_a_moment() -> None:
    """Three hundred tables with all their sizes: no more than brute force would take for ten."""
    made = {name: options_of(of, DEVICE, True) for name, of in uses_of(12, seed=3).items()}
    options = {f"{name}.{n}": costs for name, costs in made.items() for n in range(25)}
    budget = int(0.4 * sum(costs[0].bytes for costs in options.values()))
    chosen = divide(options, budget)
    assert 0.99 * budget < sum(cost.bytes for cost in chosen.values()) <= budget


# -- of a run --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log with tables that are worth a cache."""
    path = tmp_path_factory.mktemp("log") / "log.parquet"
    generate(path, rows=4000, users=3000, items=3000, categorical=2, numeric=2, seed=5)
    data.prepare([path], path.parent / "prepared")
    return path.parent / "prepared"


def run_on(wide: Path, folder: Path, *, ssd: bool = True) -> Run:
    loop = Loop(max_steps=60, evaluate_every=30)
    run = small_run(wide, folder / "run", batch_size=BATCH, loop=loop)
    return on_disk(run, folder / "disk") if ssd else run


def test_enough_memory_keeps_all(wide: Path, tmp_path: Path) -> None:
    found = place(run_on(wide, tmp_path), data.open(wide), memory=1 << 40, device=DEVICE)
    assert {table.cost.tier for table in found.tables.values()} == {in_memory()}
    assert found.ms_disk == 0.0
    assert 1e3 < found.examples_per_s < float("inf")
    assert set(found.tables) == set(data.open(wide).schema.encodings)


def _beside_tables(saved: checkpoint.Checkpoint) -> dict[str, str]:
    """The digests of all files but those of tables, whose form says where their rows are."""
    forms = ("table-", "blocks-", "newer-")
    return {name: of["sha256"] for name, of in saved.files.items() if not name.startswith(forms)}


@pytest.mark.parametrize(
    "of",
    [
        {},
        pytest.param({"state": "bf16"}, marks=pytest.mark.slow),
        {"format": int8.Config(), "cache": Cache(fraction=0.1)},
    ],
    ids=["fp32", "bf16", "cached"],
)
def test_a_run_trains_as_planned_to_the_same_bits(
    wide: Path, tmp_path: Path, of: dict[str, Any]
) -> None:
    run = run_on(wide, tmp_path)
    run = dataclasses.replace(run, tables=dataclasses.replace(run.tables, **of))
    train(run)
    found = place(run, data.open(wide), memory=1 << 40, device=DEVICE)
    options = {name: options_of(table.uses, DEVICE, True) for name, table in found.tables.items()}
    chosen = divide(options, found.bytes_tables // 2)
    tables = {n: dataclasses.replace(table, cost=chosen[n]) for n, table in found.tables.items()}
    assert "ssd" in {cost.tier.name for cost in chosen.values()}
    dataclasses.replace(found, tables=tables).save(tmp_path / "half.plan.toml", run)
    assert read(str(tmp_path / "half.plan.toml")).tiers == {
        name: cost.tier for name, cost in chosen.items()
    }
    sharding = dataclasses.replace(run.sharding, plan=str(tmp_path / "half.plan.toml"))
    train(dataclasses.replace(run, run_dir=str(tmp_path / "planned"), sharding=sharding))
    saved = [checkpoint.load(tmp_path / name / "checkpoints") for name in ("run", "planned")]
    first, second = ({**_beside_tables(one), **digests(one)} for one in saved)
    assert first == second
    held = Run.load(tmp_path / "planned" / "run.toml").tables
    rows = {name: of.rows or 0 for name, of in data.open(wide).schema.encodings.items()}
    assert {name: held.for_table(name, rows[name]).tier for name in chosen} == {
        n: cost.tier for n, cost in chosen.items()
    }


@pytest.mark.parametrize(("background", "share"), [(False, 0.7), (False, 0.3), (True, 0.4)])
def test_a_planned_run_needs_what_the_plan_says(
    wide: Path, tmp_path: Path, background: bool, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the check before a run, with what checkpoints take. All that would be faster needs more
    than there is.
    """
    monkeypatch.setattr(preflight, "resident_bytes", lambda: 0)
    monkeypatch.setattr(disk, "SAVED_PIECES", 0)  # they have more than these tables
    run, log = run_on(wide, tmp_path), data.open(wide)
    run = dataclasses.replace(run, checkpoint=Checkpoints(background=background))
    whole = place(run, log, memory=1 << 40, device=DEVICE)
    memory = whole.bytes_beside + int(share * whole.bytes_tables)
    found = place(run, log, memory=memory, device=DEVICE)
    run = preflight.resolved(run, log)
    rows = {name: of.rows or 0 for name, of in log.schema.encodings.items()}

    def needed(costs: Sequence[Cost]) -> int:
        tiers = dict(zip(found.tables, (cost.tier for cost in costs), strict=True))
        return preflight.estimate(
            dataclasses.replace(run, tables=run.tables.placed(tiers, rows)), log
        ).bytes_host

    chosen = [table.cost for table in found.tables.values()]
    assert "ssd" in {cost.tier.name for cost in chosen}
    assert needed(chosen) == found.bytes_tables + found.bytes_beside <= memory
    options = [options_of(table.uses, DEVICE, table.may_leave) for table in found.tables.values()]
    ms = sum(cost.ms for cost in chosen)
    faster = [
        costs for costs in itertools.product(*options) if sum(cost.ms for cost in costs) < ms - 1e-9
    ]
    least = min(faster, key=lambda costs: sum(cost.bytes for cost in costs))
    assert needed(least) > memory


def test_the_same_twice(wide: Path, tmp_path: Path) -> None:
    run = run_on(wide, tmp_path)
    first, second = (place(run, data.open(wide), memory=1 << 40, device=DEVICE) for _ in range(2))
    pairs = zip(first.tables.values(), second.tables.values(), strict=True)
    assert all(a.cost == b.cost and a.lookups == b.lookups for a, b in pairs)


def test_layouts_of_the_runs_plan_are_kept(wide: Path, tmp_path: Path) -> None:
    run, plan = run_on(wide, tmp_path), tmp_path / "ranks.toml"
    plan.write_text('default = "row_wise"\nlayouts = { user = { ranks = [1, 0], rows = 2 } }\n')
    run = dataclasses.replace(run, sharding=dataclasses.replace(run.sharding, plan=str(plan)))
    place(run, data.open(wide), memory=1 << 40, device=DEVICE).save(tmp_path / "out.toml", run)
    before, after = read(str(plan)), read(str(tmp_path / "out.toml"))
    assert (after.default, after.layouts) == (before.default, before.layouts)
    assert after.tiers["user"] == in_memory()


@pytest.mark.parametrize(
    ("ssd", "remedy"), [(True, "give --memory [0-9]+MB"), (False, "with --tiers.folder, or give")]
)
def test_too_little_memory_is_one_line(wide: Path, tmp_path: Path, ssd: bool, remedy: str) -> None:
    run, log = run_on(wide, tmp_path, ssd=ssd), data.open(wide)
    with pytest.MonkeyPatch.context() as patch:  # before the log is read, or the disk is tried
        patch.setattr(reuse, "uses", lambda *_: pytest.fail("the log is read"))
        patch.setattr(tiering, "probe_disk", lambda folder: pytest.fail("the disk is tried"))
        with pytest.raises(UserError, match=f"--memory: 1 MB are too few; .*{remedy}") as error:
            place(run, log, memory=1_000_000)
    assert "\n" not in str(error.value)
    told = re.search(r"give --memory (\d+)MB", str(error.value))
    assert told is not None
    # frames for batches under way, and this program has grown
    enough = 1_000_000 * int(told[1]) + 50_000_000
    assert place(run, log, memory=enough, device=DEVICE).bytes_tables


def test_without_a_folder_nothing_goes_to_disk(
    wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is all that a table can choose."""
    found: list[dict[str, list[Cost]]] = []
    monkeypatch.setattr(
        placement,
        "divide",
        lambda options, budget: found.append(options) or divide(options, budget),
    )
    for ssd in (False, True):
        place(run_on(wide, tmp_path, ssd=ssd), data.open(wide), memory=1 << 40, device=DEVICE)
    without, beside = (
        [{cost.tier.name for cost in costs} for costs in one.values()] for one in found
    )
    assert without == [{"memory"}] * len(without) and {"memory", "ssd"} in beside


def test_tables_whose_ids_come_and_go_stay_in_memory(
    wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have a line, and are counted as tables and not beside them."""
    needed, estimate = list[preflight.Needs](), preflight.estimate
    monkeypatch.setattr(
        preflight, "estimate", lambda *given: needed.append(estimate(*given)) or needed[-1]
    )
    run = run_on(wide, tmp_path)
    tables = dataclasses.replace(
        run.tables, overrides=(Override(names=("user",), addressing={"name": "dynamic"}),)
    )
    run = dataclasses.replace(run, tables=tables)
    found = place(run, data.open(wide), memory=1 << 40, device=DEVICE)
    assert set(found.tables) == set(data.open(wide).schema.encodings)
    user = found.tables["user"]
    (component,) = [use.component for use in user.uses]
    assert user.cost.tier == in_memory() and user.lookups == run.data.batch_size
    assert (
        user.cost.bytes == memory_bytes(component, component.rows, component.dim) > user.bytes_table
    )
    assert 0 < user.uses[0].references < run.data.batch_size and user.cost.ms_processor > 0
    found.save(tmp_path / "plan.toml", run)
    assert "user" not in read(str(tmp_path / "plan.toml")).tiers
    (needs,), parts = (
        needed,
        [use.component for table in found.tables.values() for use in table.uses],
    )
    small = [c if c.policy else dataclasses.replace(c, tier=placement.SMALLEST) for c in parts]
    turns = needs.turns
    saving = max(turns.pop("a checkpoint") - max(turns.values()), 0)
    kept = disk.bytes_of_kept_blocks(small, 3)
    assert found.bytes_beside == needs.bytes_host - needs.host["tables"] - kept - saving
    assert found.bytes_tables == sum(memory_bytes(part, part.rows, part.dim) for part in parts)


def test_what_each_rank_has(wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of a table have frames in proportion to their rows. A step of a rank takes less than
    that of a process.
    """
    plan, log = tmp_path / "ranks.toml", data.open(wide)
    plan.write_text(
        'default = "table_wise"\nlayouts = { user = { ranks = [1, 0, 1], rows = 3 } }\n'
    )
    run = run_on(wide, tmp_path)
    run = dataclasses.replace(run, sharding=dataclasses.replace(run.sharding, plan=str(plan)))
    assert place(run, log, memory=1 << 40, device=DEVICE).ranks == ()
    whole = place(run, log, memory=1 << 40, device=DEVICE, ranks=2)
    assert 0.5 * whole.bytes_beside < whole.bytes_beside_rank < 1.1 * whole.bytes_beside
    monkeypatch.setattr(placement, "_needed", lambda *_: (0, 0))
    # checkpoints take more than these tables
    monkeypatch.setattr(placement, "_saving", lambda *_: lambda tiers: 0)
    half = place(run, log, memory=whole.bytes_tables // 2, device=DEVICE, ranks=2)
    assert half.bytes_tables <= whole.bytes_tables // 2
    for found in (whole, half):
        want = [0, 0]
        for number, (name, table) in enumerate(found.tables.items()):
            (use,) = table.uses
            of, rows = dataclasses.replace(use.component, tier=table.cost.tier), use.component.rows
            third = -(-rows // 3)
            parts = (
                [(1, third), (0, third), (1, rows - 2 * third)]
                if name == "user"
                else [(number % 2, rows)]
            )
            for rank, count in parts:
                want[rank] += memory_bytes(of, count, of.dim)
        assert list(found.ranks) == want
    plan.write_text("[layouts.user]\nranks = [5]\n")
    with pytest.raises(UserError, match=r"^plan: table 'user' on ranks \[5\]; there are 2$"):
        place(run, log, memory=1 << 40, device=DEVICE, ranks=2)
    hosts = dataclasses.replace(run.sharding, ranks_per_host=2)
    with pytest.raises(
        UserError, match="ranks: 3 are not whole hosts of sharding.ranks_per_host 2"
    ):
        place(dataclasses.replace(run, sharding=hosts), log, memory=1 << 40, device=DEVICE, ranks=3)
