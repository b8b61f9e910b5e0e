"""Runs with tables on an SSD: one rank and many, resumed, clipped, guarded, deduplicated, as with
all in memory.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from sparrow import checkpoint, data
from sparrow.analysis import usage as of_usage
from sparrow.apps.generate import generate
from sparrow.cli import main
from sparrow.core import Chunk, KeyedJagged, UserError
from sparrow.data.batches.loader import Share
from sparrow.distributed import World
from sparrow.embeddings import UNALLOCATED, Direct, EmbeddingTables, Feature, Placement, TableSpec
from sparrow.embeddings.spec import Cache, in_memory
from sparrow.embeddings.stores import At
from sparrow.extensions.tiers import ssd
from sparrow.extensions.tiers.stores import ssd as of_ssd
from sparrow.extensions.tiers.stores.cached import ssd_of
from sparrow.extensions.tiers.stores.host import HostStore
from sparrow.extensions.tiers.stores.ssd import SsdStore
from sparrow.features.schema import Split
from sparrow.kernels.block_io import Blocks
from sparrow.kernels.formats import fp16
from sparrow.kernels.rules import adagrad
from sparrow.serving import export as of_export
from sparrow.serving import rows
from sparrow.serving.export import export
from sparrow.sharding import Codecs, Layout, column_wise, data_parallel, row_wise, shard, table_wise
from sparrow.trained.build import tables_of
from sparrow.trained.scorer import restore
from sparrow.training.feed import Feed
from sparrow.training.loop import Trainer
from tests.analysis.pages import page
from tests.data.grouped import SCHEMA, made
from tests.equivalence.pool import Pool
from tests.runs import run_of

ROWS, STEPS = 600, 20
PLANS: dict[str, Callable[[int], Layout]] = {
    "table_wise": lambda size: table_wise(size - 1),
    "row_wise": lambda size: row_wise(size),
    "column_wise": lambda size: column_wise((0, 1)),
}
QUICK_PARTS = [("table_wise", "fused", 4), ("row_wise", "deferred", 2), ("column_wise", "fused", 2)]
SETTINGS: dict[str, Any] = {
    "data.batch_size": 16,
    "model.dim": 8,
    "model.deep": [16],
    "data.id_dropout": {},
    "loop.max_steps": 24,
    "loop.evaluate_every": 15,
    "checkpoint.every": 10,
    "tables.rule.name": "adam",
    "schedule.decay": "constant",
}
ON_SSD = {"tables.tier.name": "ssd", "tables.tier.fraction": 0.1}


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log with more ids than frames."""
    path = tmp_path_factory.mktemp("wide") / "log.parquet"
    generate(path, rows=3000, users=900, items=1500, categorical=2, numeric=2, seed=5)
    # most of what a short run would take is to be judged
    split = Split(by="time", valid=0.05, test=0.05)
    return data.prepare([path], path.parent / "prepared", split=split).out


@pytest.fixture(scope="module")
def log_of_wide(wide: Path) -> Path:
    """The log itself."""
    return wide.parent / "log.parquet"


def ids_of(step: int, rank: int) -> KeyedJagged:
    g = torch.Generator().manual_seed(100 * step + rank)
    return KeyedJagged(
        keys=("a",),
        values_N=(torch.rand(16, generator=g) ** 2 * ROWS).long(),
        lengths=torch.full((8,), 2),
    )


def steps(
    world: World, folder: str | None, layout: str, mode: str, depth: int, cache: Cache | None = None
) -> tuple[list[Chunk], int]:
    """The chunks of this rank after some steps, and how many rows left frames."""
    tier = ssd.Config(fraction=0.3) if folder else in_memory()
    spec = TableSpec(
        name="t", dim=6, addressing=Direct(ROWS), rule=adagrad.Config(lr=0.3), init_scale=1.0, tier=tier,
        format=fp16.Config(), state="bf16", cache=cache or Cache(),
    )  # fmt: skip  # both are rounded stochastically
    features = [Feature(name="a", table="t")]
    tables = EmbeddingTables([spec], features, seed=1, mode=mode, placement=UNALLOCATED)  # type: ignore[arg-type]
    placement = Placement(folder=Path(folder), window=depth + 1) if folder else Placement()
    plan = {"t": PLANS[layout](world.size) if layout in PLANS else data_parallel()}
    shard(tables, plan, world, Codecs(), placement)
    batches = [ids_of(step, world.rank) for step in range(STEPS)]
    for step, ids in enumerate(batches):
        out: Any = tables(ids)["a"]
        for later in batches[step + 1 : step + 1 + depth]:
            tables.prefetch(later)
        (out * torch.arange(6)).sum().backward()
        if step % 4 == 2:
            tables.discard()
        tables.update()
    stores = [store for record in tables.all_records() if (store := ssd_of(record.store))]
    chunks = [
        dataclasses.replace(c, fields={n: t.clone() for n, t in c.fields.items()})
        for c in tables.chunks()
    ]
    return chunks, sum(store.left for store in stores)


@pytest.mark.multi
@pytest.mark.parametrize(
    ("layout", "mode", "size"),
    [
        pytest.param(*case, marks=() if case in QUICK_PARTS else pytest.mark.slow)
        for case in itertools.product(PLANS, ("fused", "deferred"), (2, 4))
    ],
)
def test_parts_on_an_ssd(
    ranks: Callable[[int], Pool], tmp_path: Path, layout: str, mode: str, size: int
) -> None:
    for depth, cache in ((0, None), (2, None), (2, Cache(fraction=0.1))):
        if depth == 0 or cache:  # in memory nothing is read ahead
            want = ranks(size).run(steps, None, layout, mode, depth, cache)
        got = ranks(size).run(steps, str(tmp_path), layout, mode, depth, cache)
        for (mine, none), (its, _) in zip(want, got, strict=True):
            assert none == 0 and len(mine) == len(its)
            for one, other in zip(mine, its, strict=True):
                assert (one.rows, one.columns) == (other.rows, other.columns)
                assert all(torch.equal(t, other.fields[name]) for name, t in one.fields.items())
        assert sum(left for _, left in got) > 20


def refused(world: World, folder: str) -> str:
    try:
        steps(world, folder, "data_parallel", "fused", 0)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.multi
def test_copies_on_an_ssd_are_refused(ranks: Callable[[int], Pool], tmp_path: Path) -> None:
    told = (
        "plan: table 't' has the tier 'ssd', and a copy would need rows of all ranks' batches; put"
        " it on one rank"
    )
    assert [text.startswith(told) for text in ranks(2).run(refused, str(tmp_path))] == [True, True]


def fit(
    world: World, prepared: str, run_dir: str, changes: dict[str, Any], resume: bool = False
) -> tuple[Any, int]:
    """The files of the last checkpoint, and how many rows left frames."""
    trainer = Trainer(run_of(prepared, run_dir, **SETTINGS | changes), resume=resume)
    trainer.fit()
    trainer.job.ranks.world.leave()
    stores = [
        ssd_of(record.store) for tables in trainer.job.tables for record in tables.all_records()
    ]
    left = sum(store.left for store in stores if store)
    saved = checkpoint.load(Path(run_dir) / "checkpoints")
    parts = {
        name: of["sha256"]
        for name, of in saved.files.items()
        if "table" not in of and "newer" not in name
    }
    return parts | digests(saved), left


def digests(saved: checkpoint.Checkpoint) -> dict[str, str]:
    """What a checkpoint has of each field of each table, whatever its form."""
    found: dict[str, Any] = {}
    for chunk in saved.chunks():
        # a resumed run has them elsewhere
        order = chunk.fields["row"].argsort() if chunk.is_cache else slice(None)
        for name, tensor in chunk.fields.items():
            of = f"table {chunk.table} {name} {chunk.columns}" + " in frames" * chunk.is_cache
            tensor = tensor if name in ("batch", "counts") else tensor[order]
            found.setdefault(of, sha256()).update(
                tensor.contiguous().view(torch.uint8).numpy().data
            )
    return {of: digest.hexdigest() for of, digest in found.items()}


CACHED = {"tables.format.name": "int8", "tables.cache.fraction": 0.1}
LFU = {"tables.cache.policy": "lfu", "tables.tier.policy": "lfu"}
# the first ones are quick; each third has the same way, see `test_runs_on_one_rank`
CASES: dict[str, dict[str, Any]] = {
    "guarded": {},
    "fused": {"loop.nonfinite": "off", "loop.update_mode": "fused"},
    "threads": {"threads": 2, "data.batch_size": 32, "loop.max_steps": 20},
    "stochastic": {"tables.format.name": "int4", "tables.state": "bf16"},
    "din": {"model.name": "din", "model.dim": 8},
    "quotient_remainder": {
        "tables.addressing.name": "quotient_remainder",
        "tables.addressing.collisions": 2,
    },
    "cached, accumulated": (
        CACHED
        | {"loop.accumulate": 3, "data.batch_size": 8, "loop.max_steps": 16}
        | {"tables.cache.policy": "lfu"}
    ),
    "clipped": {"loop.clip_norm": 0.01},
    "accumulated": {"loop.accumulate": 3, "data.batch_size": 8, "loop.max_steps": 30},
    "int8": {"tables.format.name": "int8", "tables.format.rounding": "nearest"},
    "cached": CACHED,
}
# what the other cases have too
REPEATED = ("clipped", "accumulated", "int8", "cached")


@pytest.mark.parametrize(
    ("case", "every_way"),
    [
        pytest.param(
            case, every_way, marks=pytest.mark.slow if every_way or case in REPEATED else ()
        )
        for case in CASES
        for every_way in (False, True)
    ],
)
def test_runs_on_one_rank(wide: Path, tmp_path: Path, case: str, every_way: bool) -> None:
    """At each depth, with each policy; and with one evaluation less, the rows are the same. Cases
    share the ways.
    """
    longer = {"loop.max_steps": 40} if every_way else {}
    changes, number = longer | CASES[case], list(CASES).index(case)
    want, _ = fit(World(), str(wide), str(tmp_path / "memory"), changes)
    few, wider = (
        {"tables.tier.policy": "lru"},
        {"tables.tier.policy": "lfu", "tables.tier.fraction": 0.12},
    )
    ways = ((0, few), (1 + number // 3 % 3, wider), (4, few))
    for depth, how in ways if every_way else ways[number % 3 :][:1]:
        on_ssd = ON_SSD | {"tiers.folder": str(tmp_path / "disk"), "tiers.prefetch": depth} | how
        got, left = fit(World(), str(wide), str(tmp_path / f"ssd{depth}"), changes | on_ssd)
        assert got == want and left > (30 if how is few else 10)  # `lfu` lets few leave
    if every_way or number % 3 == 0:
        alone, _ = fit(
            World(),
            str(wide),
            str(tmp_path / "alone"),
            changes | on_ssd | {"loop.evaluate_every": 1000},
        )
        assert all(
            alone[name] == digest for name, digest in want.items() if name.startswith("table")
        )


@pytest.mark.parametrize("case", ["guarded", pytest.param("accumulated", marks=pytest.mark.slow)])
def test_batches_that_are_not_finite(
    wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """Under the guard they are left out whole, though their rows were read ahead."""
    prepare = Feed._for_training

    def spoilt(self: Feed, share: Share) -> Share:
        position, found = self.loader.state_dict()["batch"], prepare(self, share)
        if position % 7 not in (2, 3):
            return found
        dense_BC = found.batch.dense_BC.clone()
        dense_BC[: 1 + position % 5] = torch.nan
        return dataclasses.replace(found, batch=dataclasses.replace(found.batch, dense_BC=dense_BC))

    monkeypatch.setattr(Feed, "_for_training", spoilt)
    changes = CASES[case]
    want, _ = fit(World(), str(wide), str(tmp_path / "memory"), changes)
    skipped = json.loads((tmp_path / "memory" / "results.json").read_text())["skipped_steps"]
    assert skipped > 5
    for depth, policy, fraction in ((0, "lru", 0.1), (3, "lfu", 0.12)):
        how = {
            "tables.tier.policy": policy,
            "tables.tier.fraction": fraction,
            "tiers.folder": str(tmp_path / "disk"),
        }
        how |= {"tiers.prefetch": depth}
        got, left = fit(World(), str(wide), str(tmp_path / f"ssd{depth}"), changes | ON_SSD | how)
        assert got == want and left > 10


def test_rows_of_groups_looked_up_once(tmp_path: Path) -> None:
    pq.write_table(made(300, 6, ids=600), tmp_path / "log.parquet")
    encodings = {name: dataclasses.replace(of, rows=900) for name, of in SCHEMA.encodings.items()}
    schema = dataclasses.replace(SCHEMA, encodings=encodings)
    data.prepare([tmp_path / "log.parquet"], tmp_path / "prepared", schema=schema)
    changes: dict[str, Any] = {
        "data.dedup": "on",
        "model.history.lists": ["history", "tags"],
        "loop.clip_norm": 0.01,
    }
    fits = {}
    for name in ("memory", "ssd", "off"):
        how = {
            "memory": {},
            "ssd": ON_SSD | {"tiers.folder": str(tmp_path / "disk")},
            "off": {"data.dedup": "off"},
        }[name]
        fits[name] = fit(World(), str(tmp_path / "prepared"), str(tmp_path / name), changes | how)
    assert fits["ssd"][0] == fits["memory"][0] and fits["ssd"][1] > 30
    assert fits["off"][0] != fits["memory"][0], "rows are not looked up once"


@pytest.mark.parametrize(
    "way",
    [
        "threads",
        "reference",
        *(pytest.param(way, marks=pytest.mark.slow) for way in ("io_uring", "without O_DIRECT")),
    ],
)
def test_ways_to_read_and_write(
    wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: Any
) -> None:
    held: AbstractContextManager[Any] = nullcontext()
    if way.startswith("without"):
        monkeypatch.delattr(os, "O_DIRECT", raising=False)
        held = pytest.warns(UserWarning, match="has no O_DIRECT")
    else:
        options = {"chance": Random(7)} if way == "reference" else {}
        monkeypatch.setattr(of_ssd, "Blocks", partial(Blocks, way=way, **options))
    few = ON_SSD | {"tables.tier.fraction": 0.05, "tiers.folder": str(tmp_path / "disk")}
    longer = {"loop.max_steps": 40}
    want, _ = fit(World(), str(wide), str(tmp_path / "memory"), longer)
    with held:
        got, left = fit(World(), str(wide), str(tmp_path / "ssd"), longer | few)
    assert got == want and left > 100


ROWS_OF = [{"tables.format.name": "fp16"}, CACHED, CACHED | LFU]


@pytest.mark.slow
@pytest.mark.parametrize("of", ROWS_OF)
def test_a_run_goes_on_from_another_tier(wide: Path, tmp_path: Path, of: dict[str, Any]) -> None:
    on_ssd = ON_SSD | {"tiers.folder": str(tmp_path / "disk")}
    want, _ = fit(World(), str(wide), str(tmp_path / "memory"), of)
    tiers: list[dict[str, Any]] = [{}, on_ssd, {**on_ssd, "tables.tier.fraction": 1.0}]
    for begin in tiers:
        for end in tiers[not begin : 2]:
            place = str(tmp_path / f"{tiers.index(begin)}{tiers.index(end)}")
            fit(World(), str(wide), place, of | begin | {"loop.max_steps": 12})
            for later in (17, 24):
                got, _ = fit(
                    World(), str(wide), place, of | end | {"loop.max_steps": later}, resume=True
                )
            assert {n: of for n, of in got.items() if "progressive" not in n} == {
                n: of for n, of in want.items() if "progressive" not in n
            }


@pytest.mark.parametrize(
    "of", [*(pytest.param(of, marks=pytest.mark.slow) for of in ROWS_OF[:2]), ROWS_OF[2]]
)
def test_a_run_goes_to_another_tier_and_back(
    wide: Path, tmp_path: Path, of: dict[str, Any]
) -> None:
    """Again and again, and every bit comes back."""
    want, _ = fit(World(), str(wide), str(tmp_path / "memory"), of)
    for number, steps in enumerate((7, 10, 15, 24)):
        tier = {} if number % 2 else ON_SSD | {"tiers.folder": str(tmp_path / "disk")}
        how = of | tier | {"loop.max_steps": steps}
        got, _ = fit(World(), str(wide), str(tmp_path / "to and fro"), how, resume=number > 0)
    assert all(got[name] == of for name, of in want.items() if "progressive" not in name)


HOST = {"tables.tier.name": "host", "tables.tier.fraction": 0.1, "tiers.prefetch": 2}


@pytest.mark.parametrize(
    "case",
    [
        "cached, accumulated",
        *(
            pytest.param(case, marks=pytest.mark.slow)
            for case in ("stochastic", "accumulated", "cached")
        ),
    ],
)
def test_rows_of_the_host_beneath_frames(wide: Path, tmp_path: Path, case: str) -> None:
    """With the CPU as both. A run goes on from there on an SSD, and back, and its rows are read by
    all.

    The host's rows are on an SSD in turn, too.
    """
    want, _ = fit(World(), str(wide), str(tmp_path / "memory"), CASES[case])
    got, left = fit(World(), str(wide), str(tmp_path / "host"), CASES[case] | HOST)
    assert got == want and left > 30
    on_ssd = ON_SSD | {"tiers.folder": str(tmp_path / "disk")}
    over = HOST | {
        "tables.tier.beneath.name": "ssd",
        "tables.tier.beneath.fraction": 0.4,
        "tiers.folder": str(tmp_path / "disk"),
    }
    for tier, steps in ((HOST, 3), (on_ssd, 6), (over, 9), (on_ssd, 12), (over, 40)):
        how = (
            CASES[case]
            | tier
            | {"loop.max_steps": min(steps, CASES[case].get("loop.max_steps", 24))}
        )
        got, _ = fit(World(), str(wide), str(tmp_path / "to and fro"), how, resume=steps > 3)
        restored = restore(tmp_path / "to and fro", which="last")
        stores = [
            ssd_of(record.store)
            for tables in tables_of(restored.model)
            for record in tables.all_records()
        ]
        assert all(
            isinstance(store, HostStore) == (tier is not on_ssd) for store in stores if store
        )
    assert {n: of for n, of in got.items() if "progressive" not in n} == {
        n: of for n, of in want.items() if "progressive" not in n
    }
    batch = next(iter(data.open(wide).loader(64, "valid")))
    scores = [
        restore(tmp_path / of, which="last").scores(batch)
        for of in ("memory", "host", "to and fro")
    ]
    assert torch.equal(scores[0], scores[1]) and torch.equal(scores[0], scores[2])


@pytest.mark.multi
@pytest.mark.parametrize(
    ("size", "every_way"),
    [
        (2, False),
        pytest.param(2, True, marks=pytest.mark.slow),
        pytest.param(4, True, marks=pytest.mark.slow),
    ],
)
def test_runs_on_many_ranks(
    ranks: Callable[[int], Pool], wide: Path, tmp_path: Path, size: int, every_way: bool
) -> None:
    changes = {
        "sharding.plan": "row_wise",
        "data.batch_size": 16,
        "loop.clip_norm": 0.01,
        "loop.accumulate": 2,
    }
    changes["loop.max_steps"] = 12
    want = ranks(size).run(fit, str(wide), str(tmp_path / "memory"), changes)
    on_ssd = ON_SSD | {
        "tiers.folder": str(tmp_path / "disk"),
        "tables.tier.fraction": 0.1 * size / 2,
    }
    got = ranks(size).run(fit, str(wide), str(tmp_path / "ssd"), changes | on_ssd)
    assert got[0][0] == want[0][0] and sum(left for _, left in got) > 0
    if size == 2:
        over = {
            "tables.tier.beneath.name": "ssd",
            "tables.tier.beneath.fraction": 0.4,
            "tiers.folder": str(tmp_path / "disk"),
        }
        got = ranks(size).run(fit, str(wide), str(tmp_path / "over"), changes | HOST | over)
        assert got[0][0] == want[0][0] and sum(left for _, left in got) > 0
    if size == 2 and every_way:
        got = ranks(size).run(fit, str(wide), str(tmp_path / "host"), changes | HOST)
        assert got[0][0] == want[0][0] and sum(left for _, left in got) > 0
    went_on = [(1, "row_wise", 15)]
    if size == 2:
        went_on += [(2, "column_wise", 18), (4, "table_wise", 21), (2, "row_wise", 24)]
    # each reads what the one before has written, with other parts of tables
    for number, plan, steps in went_on if every_way else went_on[:2]:
        how = {"sharding.plan": plan, "loop.max_steps": steps}
        found = []
        for name, tier in (("ssd", on_ssd | {"tables.tier.fraction": 0.4}), ("memory", {})):
            given = (str(wide), str(tmp_path / name), tier | how, True)
            found.append(ranks(number).run(fit, *given) if number > 1 else [fit(World(), *given)])
        assert found[0][0][0] == found[1][0][0], (number, plan)


@pytest.fixture(scope="module")
def finished(wide: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The same run in memory and on an SSD."""
    place = tmp_path_factory.mktemp("finished")
    for name, tier in (("memory", {}), ("ssd", ON_SSD | {"tiers.folder": str(place / "disk")})):
        fit(World(), str(wide), str(place / name), tier)
    return [place / "memory", place / "ssd"]


def cells_of(path: Path) -> list[str]:
    """What a report says, but for bytes of memory."""
    return [cell for cell in page(path).cells if not cell.endswith("B")]


COMMANDS: dict[str, tuple[list[str], Callable[[Path], Any]]] = {
    "evaluate": (["--json-out"], Path.read_text),
    "predict": (["LOG", "--out"], pq.read_table),
    "report": (["--rows", "0", "--by", "user", "--out"], cells_of),
}


@pytest.mark.parametrize(
    "command", ["evaluate", "predict", pytest.param("report", marks=pytest.mark.slow)]
)
def test_commands_on_a_finished_run(
    finished: list[Path], log_of_wide: Path, tmp_path: Path, command: str
) -> None:
    flags, told = COMMANDS[command]
    said = []
    for run in finished:
        given = [str(log_of_wide) if flag == "LOG" else flag for flag in flags]
        out = tmp_path / f"{run.name}.parquet"
        assert main([command, str(run), *given, str(out)]) == 0
        said.append(told(out))
    assert said[0] == said[1]


def test_what_a_run_has_learnt_is_read_by_all(
    wide: Path,
    log_of_wide: Path,
    finished: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Scores, a model folder, uses of rows and a run that begins with it, of a run on an SSD, in
    pieces.
    """
    plain, place = map(str, finished)
    disk = finished[0].parent / "disk"
    on_ssd = ON_SSD | {"tiers.folder": str(disk)}
    batch = next(iter(data.open(wide).loader(64, "valid")))
    want = restore(plain).scores(batch)
    found = restore(place)
    assert all(
        isinstance(r.store, SsdStore)
        for tables in tables_of(found.model)
        for r in tables.all_records()
    )
    assert torch.equal(found.scores(batch), want)
    read, most = SsdStore.read, [0]

    def counted(self: SsdStore, at: At) -> dict[str, torch.Tensor]:
        fields = read(self, at)
        if isinstance(at, slice):  # others are rows that batches look up
            most.append(len(fields["touched"]))
        return fields

    with monkeypatch.context() as small:
        for module, name in ((rows, "BLOCK"), (of_export, "BLOCK"), (of_usage, "PIECE")):
            small.setattr(module, name, 1 << 8)
        small.setattr(SsdStore, "read", counted)
        export(place, tmp_path / "folder", [log_of_wide])
        log = data.open(wide)
        shares = [
            [
                use.share_unlearnt
                for use in of_usage.count_usage(
                    restore(of), log, (), lambda what, done, total: None
                )[0]
            ]
            for of in (place, plain)
        ]
    assert shares[0] == shares[1] and 0 < max(most) <= 1 << 8
    export(plain, tmp_path / "other", [log_of_wide])
    tables = [sorted((tmp_path / of).rglob("*.safetensors")) for of in ("folder", "other")]
    assert len(tables[0]) == len(tables[1]) > 3
    assert all(one.read_bytes() == other.read_bytes() for one, other in zip(*tables, strict=True))
    begun = [{"init_from": place, **on_ssd}, {"init_from": place}, {"init_from": plain}]
    ends = [
        fit(World(), str(wide), str(tmp_path / f"next{n}"), changes)[0]
        for n, changes in enumerate(begun)
    ]
    assert ends[0] == ends[1] == ends[2]
    disk.rename(tmp_path / "elsewhere")
    try:
        with pytest.raises(
            UserError,
            match=r"table \w+: .*disk/ssd-\w+/\w+\.\w+\.blocks is missing; bring it back to there, or",
        ):
            restore(place)
    finally:
        (tmp_path / "elsewhere").rename(disk)
    assert torch.equal(restore(place).scores(batch), want)
