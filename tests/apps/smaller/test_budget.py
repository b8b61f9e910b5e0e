from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor

from sparrow import data
from sparrow.analysis.judge import judges
from sparrow.analysis.usage import count_usage
from sparrow.apps.smaller.alternatives import Alternative, Bytes, alternatives, changed
from sparrow.apps.smaller.budget import propose
from sparrow.apps.smaller.damage import Rebuilt, in_floats, means, rebuild_rows
from sparrow.apps.smaller.learned_hash import fit
from sparrow.apps.smaller.plans import Option, Plan, choose_plan
from sparrow.core import UserError
from sparrow.embeddings import Hashed, Numbering, TableChoices
from sparrow.embeddings.addressing.learned import Map
from sparrow.embeddings.choices import Override
from sparrow.embeddings.spec import Cache
from sparrow.features.schema import Column, Encoding, Schema, Split
from sparrow.kernels.formats import RowFormat, fp32, int8
from sparrow.trained.build import tables_of
from sparrow.trained.run import Loop, Run
from sparrow.trained.scorer import Restored, restore
from sparrow.training import train
from sparrow.training.loop import Trainer
from sparrow.training.preflight import dense_state
from tests.pace import Deadline
from tests.runs import run_of, small_run


def quiet(what: str, done: int, total: int) -> None:
    """Progress that nobody watches."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, prepared: Path) -> Path:
    run_dir = tmp_path_factory.mktemp("budget") / "run"
    train(small_run(prepared, run_dir))
    return run_dir


def choices_of(
    found: Restored, table: str, maps: Mapping[str, list[Path]] = MappingProxyType({})
) -> list[Alternative]:
    spec = next(spec for spec in all_specs(found) if spec.name == table)
    uses, _ = count_usage(found, data.open(found.run.data.path), (), quiet)
    hits = {use.name: use.hits_R for use in uses}
    return alternatives(
        found.run, found.schema, spec, dense_state(found.run), maps.get(table, []), hits.get(table)
    )


def rows_of(found: Restored) -> dict[str, Tensor]:
    return {
        r.name: r.weight.clone() for tables in tables_of(found.model) for r in tables.all_records()
    }


def half(found: Restored, table: str) -> int:
    """Half the rows of a table."""
    return round((found.schema.encodings[table].rows or 0) / 2)


def allocated(trainer: Trainer) -> dict[str, int]:
    """Bytes of every tensor that tables have in training, and of those that serving needs."""
    train, serve = 0, 0
    for tables in trainer.job.tables:
        for record in tables.all_records():
            sizes = {name: tensor.nbytes for name, tensor in record.fields.items()}
            train, serve = train + sum(sizes.values()), serve + sizes["weight"]
        for weight in tables.combines.parameters():
            state = trainer.job.optimizer.state[weight].values()
            train += weight.nbytes + sum(v.nbytes for v in state if isinstance(v, Tensor))
            serve += weight.nbytes
        for spec in tables.specs:
            if spec.addressing.traits.bytes_map:
                addressing: Any = spec.addressing
                train, serve = (
                    train + addressing.map.row_S.nbytes,
                    serve + addressing.map.row_S.nbytes,
                )
    return {"train": train, "serve": serve}


def test_bytes_promised_are_allocated(prepared: Path, tmp_path: Path) -> None:
    """One table of each kind, through the run file that is written."""
    table = data.open(prepared).schema.encodings["tags"]
    rows = table.rows or 0
    Map(torch.arange(rows, dtype=torch.int32) % 7, 7, 2, 10, table.digest or "").save(
        tmp_path / "map"
    )
    learned = Override(
        names=("tags",), addressing={"name": "learned", "file": str(tmp_path / "map")}
    )
    train(
        small_run(
            prepared,
            tmp_path / "run",
            tables=TableChoices(overrides=(learned,)),
            loop=Loop(max_steps=2),
        )
    )
    found = restore(tmp_path / "run")
    wanted: dict[str, dict[str, Any]] = {
        "user": {"addressing": {"name": "hashed", "rows": half(found, "user")}},
        "item": {
            "addressing": {"name": "quotient_remainder", "operation": "mult", "collisions": 4}
        },
        "cat_0": {"addressing": {"name": "mixed_dimension", "dims": [2]}},
        "cat_1": {"format": {"name": "fp16"}},
        "cat_2": {
            "addressing": {"name": "cut", "rows": half(found, "cat_2")},
            "format": {"name": "int8"},
        },
        "tags": {},
    }
    assert len(choices_of(found, "tags")) == 1  # learned: no other choice
    allocate(found, wanted, {}, tmp_path / "one")
    fit(data.open(prepared), "item", half(found, "item"), quiet).save(tmp_path / "item")
    wanted |= {
        "user": {"addressing": {"name": "coprime", "operation": "mult", "collisions": 4}},
        "item": {
            "addressing": {"name": "learned", "file": str(tmp_path / "item")},
            "format": {"name": "int8"},
        },
        "cat_2": {"addressing": {"name": "path", "collisions": 4}},
    }
    allocate(found, wanted, {"item": [tmp_path / "item"]}, tmp_path / "two")
    wanted |= {
        "user": {"addressing": {"name": "quotient_remainder", "operation": "add", "collisions": 4}},
        "item": {"format": {"name": "int4"}},
    }
    allocate(found, wanted, {}, tmp_path / "three")
    *_, blocks = (one.change for one in choices_of(found, "cat_2") if "blocks" in one.description)
    wanted |= {
        "user": {
            "addressing": {"name": "quotient_remainder", "operation": "concat", "collisions": 4}
        },
        "cat_2": blocks,
    }
    allocate(found, wanted, {}, tmp_path / "four")


def allocate(
    found: Restored, wanted: dict[str, dict[str, Any]], maps: dict[str, list[Path]], place: Path
) -> None:
    """Train what is promised, and compare."""
    made = {
        name: [one for one in choices_of(found, name, maps) if one.change == of]
        for name, of in wanted.items()
    }
    assert [len(of) for of in made.values()] == [1] * len(wanted)
    place.mkdir()
    for purpose in ("train", "serve"):
        plan = Plan(
            options=tuple(Option(alternative=of[0]) for of in made.values()), purpose=purpose
        )  # type: ignore[arg-type]
        plan.run(found.run, str(place / purpose)).save(place / "small.toml")
        run = Run.load(place / "small.toml")
        trainer = Trainer(dataclasses.replace(run, loop=Loop(max_steps=2)))
        trainer.fit()
        assert allocated(trainer)[purpose] == plan.bytes
        assert plan.bytes < sum(
            Bytes.from_spec(spec, dense_state(found.run)).to(purpose) for spec in all_specs(found)
        )  # type: ignore[arg-type]


def all_specs(found: Restored) -> list[Any]:
    return [spec for tables in tables_of(found.model) for spec in tables.specs]


def test_rows_are_as_before_when_all_was_measured(trained: Path) -> None:
    found = in_floats(restore(trained))
    dataset = data.open(found.run.data.path)
    uses, _ = count_usage(found, dataset, (), quiet)
    rebuilds, (judge, _) = (
        Rebuilt(found, {use.name: use.hits_R for use in uses}),
        judges(dataset, 100),
    )
    before, base = rows_of(found), judge.ne(found)
    every = [
        one
        for spec in all_specs(found)
        for one in choices_of(found, spec.name)
        if one.how == "rebuilt"
    ]
    assert len(every) > 30
    for one in every:
        with rebuilds.holding([one]) as held:
            now = rows_of(held)
            assert [name for name in now if not torch.equal(now[name], before[name])] == [one.table]
    after = rows_of(found)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert judge.ne(found).value == base.value


def test_blocks_of_a_table_are_looked_up_equally_often(trained: Path) -> None:
    found = restore(trained)
    uses, _ = count_usage(found, data.open(found.run.data.path), (), quiet)
    hits_R = next(use.hits_R for use in uses if use.name == "cat_2")
    choices = [one for one in choices_of(found, "cat_2") if "blocks" in one.description]
    assert [one.how for one in choices] == ["trained", "trained"]
    assert "mixed_dimension, 7 blocks, dims 4 4 3 2 2 1 1" in [one.description for one in choices]
    for one in choices:
        edges, dims = (one.change["addressing"][name] for name in ("edges", "dims"))
        assert dims == sorted(dims, reverse=True)
        marks = hits_R.sum() * torch.arange(1, 8) / 8  # two of which are in a row of one id
        before, after = (
            hits_R.cumsum(0)[torch.tensor(edges) - 2],
            hits_R.cumsum(0)[torch.tensor(edges) - 1],
        )
        for mark in marks:
            assert ((before <= mark) & (mark <= after)).sum() == 1
    assert not [
        one for one in choices_of(found, "user") if "blocks" in one.description
    ]  # ids that do not fall in frequency


def test_a_choice_is_what_the_run_file_makes_of_it(prepared: Path, tmp_path: Path) -> None:
    """Also where a run has overrides of its own, settled sizes, and a cache that only rounded rows
    have.
    """
    overrides = (
        Override(where="rows > 20", rule={"lr": 0.02}),
        Override(names=("item",), state="bf16"),
    )
    tables = TableChoices(overrides=overrides, cache=Cache(fraction=0.1))
    tables = dataclasses.replace(tables, sizes={"user": {"name": "hashed", "rows": 90}})
    train(small_run(prepared, tmp_path / "run", tables=tables, loop=Loop(max_steps=2)))
    found = restore(tmp_path / "run")
    for spec in all_specs(found):
        ids = Numbering.of(found.schema.encodings[spec.name])
        for one in choices_of(found, spec.name)[1:]:
            then = changed(found.run.tables, {spec.name: one.change}).spec(
                spec.name, spec.dim, ids, spec.init_scale
            )
            assert one.spec == then, one.description


def test_what_rows_become() -> None:
    torch.manual_seed(0)
    spec_of = {"dim": 6, "ids": Numbering(40)}

    def one(change: dict[str, Any]) -> Alternative:
        spec = changed(TableChoices(), {"t": change}).spec("t", **spec_of)
        return Alternative(
            change=change, spec=spec, bytes=Bytes.from_spec(spec, (2, 4)), how="rebuilt"
        )

    weight_RD, hits_R = torch.randn(40, 6), torch.randint(0, 5, (40,))
    cut = rebuild_rows(one({"addressing": {"name": "cut", "rows": 11}}), weight_RD, hits_R)
    tail = (weight_RD[10:] * hits_R[10:, None]).sum(0) / hits_R[10:].sum()
    assert torch.equal(cut[:10], weight_RD[:10])
    torch.testing.assert_close(cut[10:], tail.expand(30, 6))
    hashed = rebuild_rows(one({"addressing": {"name": "hashed", "rows": 9}}), weight_RD, hits_R)
    (row_R,) = Hashed(9).rows_of(torch.arange(40))
    for row in row_R.unique():
        here = row_R == row
        share = (
            hits_R[here].double() if hits_R[here].any() else torch.ones(int(here.sum())).double()
        )
        wanted = (weight_RD[here] * (share / share.sum())[:, None]).sum(0).float()
        torch.testing.assert_close(hashed[here], wanted.expand(int(here.sum()), 6))
    thin = rebuild_rows(
        one({"addressing": {"name": "mixed_dimension", "dims": [2]}}), weight_RD, hits_R
    )
    assert torch.linalg.matrix_rank(thin, rtol=1e-5) == 2
    scaled_RD = weight_RD * hits_R[:, None].sqrt()
    # Eckart and Young: no rank of two does better
    least = torch.linalg.svdvals(scaled_RD)[2:].square().sum()
    torch.testing.assert_close(((weight_RD - thin) * hits_R[:, None].sqrt()).square().sum(), least)
    stored = rebuild_rows(one({"format": {"name": "int8"}}), weight_RD, hits_R)
    step_R1 = (weight_RD.amax(1) - weight_RD.amin(1))[:, None] / 255
    assert ((stored - weight_RD).abs() <= 1.01 * step_R1 + 1e-6).all() and not torch.equal(
        stored, weight_RD
    )
    both = rebuild_rows(
        one({"addressing": {"name": "cut", "rows": 11}, "format": {"name": "fp16"}}),
        weight_RD,
        hits_R,
    )
    assert (both - cut).abs().max() < 0.003 and torch.equal(both[10], both[39])


def test_choices_of_a_table_of_hashes(log: Path, tmp_path: Path) -> None:
    columns = {"label": Column(kind="label"), "user": Column(kind="categorical", table="user")}
    columns["item"] = Column(kind="categorical", table="item")
    encodings = {"user": Encoding(kind="hash", rows=512), "item": Encoding(kind="hash", rows=64)}
    data.prepare(
        [log],
        tmp_path / "log",
        schema=Schema(columns=columns, encodings=encodings, split=Split(test=0.0)),
    )
    train(small_run(tmp_path / "log", tmp_path / "run", loop=Loop(max_steps=4)))
    found = restore(tmp_path / "run")
    choices = choices_of(found, "user")
    names = {one.change.get("addressing", {}).get("name") for one in choices}
    assert names == {
        None,
        "hashed",
        "mixed_dimension",
        "quotient_remainder",
        "coprime",
    }  # hashes do not fall in frequency
    assert {one.change["addressing"]["fold"] for one in choices if "mult" in one.description} == {
        True
    }
    assert "quotient_remainder, operation mult, folded, collisions 4" in {
        one.description for one in choices
    }
    assert {
        ", folded" in one.description for one in choices if "collisions" in one.description
    } == {True}
    factors = {"operation": "mult", "fold": True, "collisions": 4}
    wanted = {
        "user": {"addressing": {"name": "quotient_remainder", **factors}},
        "item": {"addressing": {"name": "coprime", **factors}},
    }
    allocate(found, wanted, {}, tmp_path / "folded")
    said = propose(
        tmp_path / "run",
        3000,
        "train",
        rows=200,
        trainings=1,
        examples=500,
        seeds=2,
        progress=quiet,
    )
    Trainer(
        dataclasses.replace(
            said.plan.run(found.run, str(tmp_path / "small")), loop=Loop(max_steps=2)
        )
    ).fit()
    assert said.plan.bytes <= 3000 < said.before.bytes


def test_means_of_rows_without_lookups_are_plain() -> None:
    weight_RD = torch.tensor([[1.0], [3.0], [5.0]])
    assert means(weight_RD, torch.tensor([0, 0, 7]), torch.tensor([0, 0, 1]), 3).tolist() == [
        [2.0],
        [5.0],
        [0.0],
    ]


def test_rows_in_few_bits_with_a_cache_are_judged_as_they_are_read(
    prepared: Path, tmp_path: Path
) -> None:
    tables = TableChoices(format=int8.Config(), cache=Cache(fraction=0.1))
    train(small_run(prepared, tmp_path / "run", tables=tables, loop=Loop(max_steps=8)))
    found = restore(tmp_path / "run")
    batch = data.open(prepared).first(300, "valid")
    torch.testing.assert_close(
        in_floats(found).scores(batch), found.scores(batch), rtol=1e-5, atol=1e-6
    )
    told = {one.description for one in choices_of(found, "cat_2")}
    assert told >= {"as it is", "int4", f"cut, rows {half(found, 'cat_2')}"}
    assert not [one for one in told if one.endswith("int8")]  # it is that already


@pytest.mark.parametrize("format", [fp32.Config(), int8.Config()])
def test_ids_that_come_and_go_keep_their_rows_when_choices_are_judged(
    prepared: Path, tmp_path: Path, format: RowFormat
) -> None:
    """Also those that expired: the clock goes on where training left it."""
    addressing = {"name": "dynamic", "rows": 30, "ttl": 1500, "after": 2}
    overrides = (Override(names=("user",), addressing=addressing),)
    tables = TableChoices(format=format, cache=Cache(fraction=0.3), overrides=overrides)
    train(small_run(prepared, tmp_path / "run", tables=tables))
    found = restore(tmp_path / "run")
    batch = data.open(prepared).first(300, "valid")
    floats = in_floats(found)
    torch.testing.assert_close(floats.scores(batch), found.scores(batch), rtol=1e-5, atol=1e-6)
    of, was = (tables_of(one.model)[0].rows_of(batch.ids, "user") for one in (floats, found))
    assert torch.equal(of["user"], was["user"]) and len(of["user"].unique()) > 10
    said = propose(tmp_path / "run", 12_000, "train", rows=200, trainings=0, progress=quiet)
    assert (
        next(
            one for one in said.plan.options if one.alternative.table == "user"
        ).alternative.description
        == "as it is"
    )


def whole_of(found: Restored, purpose: Any = "train") -> int:
    """Bytes of all tables as they are."""
    return sum(
        Bytes.from_spec(spec, dense_state(found.run)).to(purpose) for spec in all_specs(found)
    )


def test_a_proposal(trained: Path, tmp_path: Path) -> None:
    found = restore(trained)
    whole = whole_of(found)
    told: set[str] = set()
    said = propose(
        trained,
        whole // 2,
        "train",
        keep=("item",),
        rows=200,
        trainings=2,
        examples=600,
        seeds=2,
        progress=lambda what, n, total: told.add(what),
    )
    assert said.before.bytes == whole and said.plan.bytes <= whole // 2
    assert told == {"counted train", "parts alone", "short trainings"}
    assert said.verdict is not None and said.verdict.plans[0].plan == said.plan
    assert len(said.verdict.plans) == 2 and [one.seeds for one in said.verdict.plans] == [2, 2]
    chosen = {one.alternative.table: one for one in said.plan.options}
    assert chosen["item"].alternative.description == "as it is"
    costs = [sum(one.cost for one in plan.options) for plan in said.curve]
    assert (
        costs == pytest.approx(sorted(costs, reverse=True))
        and said.curve[-1].options == said.before.options
    )
    run = said.plan.run(said.run, str(tmp_path / "small"))
    run.save(tmp_path / "small.toml")
    assert Run.load(tmp_path / "small.toml").tables.overrides == run.tables.overrides
    changed_ones = {name for override in run.tables.overrides for name in override.names or ()}
    assert changed_ones == {name for name, one in chosen.items() if one.alternative.change}


def test_nothing_is_read_where_tables_keep_to_the_budget(trained: Path, tmp_path: Path) -> None:
    """Neither the log is counted, nor are rows scored, nor is anything trained."""
    whole = whole_of(restore(trained))
    told: list[str] = []
    said = propose(
        trained,
        whole,
        "train",
        maps=tmp_path / "maps",
        progress=lambda what, n, total: told.append(what),
    )
    assert said.plan is said.before and said.verdict is None and said.curve == ()
    assert not told and not list(tmp_path.iterdir())


@pytest.mark.parametrize("tier", [pytest.param("ssd", marks=pytest.mark.slow), "mapped", "cached"])
def test_bytes_of_a_proposal_are_those_of_the_run_that_follows(
    prepared: Path, tmp_path: Path, tier: str
) -> None:
    """Wherever rows are: half of all bytes, memory and disk together, is half of them after
    training.
    """
    where: dict[str, Any] = {
        "tables.tier.name": tier,
        "tiers.folder": str(tmp_path / "disk"),
        "tables.tier.fraction": 0.2,
    }
    where = (
        where if tier != "cached" else {"tables.format.name": "int8", "tables.cache.fraction": 0.3}
    )
    settings = {
        "data.batch_size": 16,
        "model.dim": 8,
        "model.deep": [8],
        "data.id_dropout": {},
        "loop.max_steps": 2,
    }
    whole = train(run_of(prepared, tmp_path / "run", **settings, **where))["tables"]["bytes"]
    said = propose(tmp_path / "run", whole // 2, "train", rows=200, trainings=0, progress=quiet)
    maps = sum(
        one.alternative.bytes.map + one.alternative.bytes.combine for one in said.plan.options
    )
    beside = maps + sum(one.alternative.bytes.combine_state for one in said.plan.options)
    assert said.before.bytes == whole and whole // 4 < said.plan.bytes <= whole // 2
    trained = train(said.plan.run(said.run, str(tmp_path / "small")))["tables"]
    assert trained["bytes"] + beside == said.plan.bytes
    assert trained.get("bytes_disk", 0) == sum(
        one.alternative.bytes.disk for one in said.plan.options
    )


def test_what_cannot_be_done_says_why(trained: Path, log: Path, tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match="--budget: 10 B are too few, the smallest plan takes .*B to train"
    ):
        propose(trained, 10, "train", rows=200, progress=quiet)
    with pytest.raises(UserError, match="--keep: no table 'itm'; did you mean 'item'"):
        propose(trained, 10**9, "serve", keep=("itm",), rows=200, progress=quiet)
    columns = {"label": Column(kind="label"), "user": Column(kind="categorical", table="user")}
    columns["item"] = Column(kind="categorical", table="item")
    encodings = {name: Encoding() for name in ("user", "item")}
    schema = Schema(
        columns=columns, encodings=encodings, split=Split(by="ratio", valid=0.0, test=0.1)
    )
    data.prepare([log], tmp_path / "log", schema=schema)
    train(small_run(tmp_path / "log", tmp_path / "run", loop=Loop(max_steps=2)))
    with pytest.raises(
        UserError,
        match="its valid part is empty, and damage is measured there; prepare with --valid",
    ):
        propose(tmp_path / "run", 1000, "train", rows=200, progress=quiet)


def test_labels_that_are_all_alike(tmp_path: Path) -> None:
    for name, labels in (("train", [0, 1] * 50), ("valid", [0] * 20)):
        ids = [f"u{i % 30}" for i in range(len(labels))]
        columns = {"label": labels, "user": ids, "item": ids}
        pq.write_table(pa.table(columns), tmp_path / f"{name}.parquet")
    kinds: dict[str, Any] = {"label": Column(kind="label")}
    kinds |= {name: Column(kind="categorical", table=name) for name in ("user", "item")}
    encodings = {name: Encoding() for name in ("user", "item")}
    schema = Schema(
        columns=kinds,
        encodings=encodings,
        split=Split(valid_files=(str(tmp_path / "valid.parquet"),)),
    )
    data.prepare([tmp_path / "train.parquet"], tmp_path / "log", schema=schema)
    train(small_run(tmp_path / "log", tmp_path / "run", loop=Loop(max_steps=2)))
    with pytest.raises(UserError, match="the labels of its valid part are all alike"):
        propose(tmp_path / "run", 1000, "train", rows=200, progress=quiet)


@pytest.mark.parametrize("step", [10, pytest.param(1, marks=pytest.mark.slow)])
def test_a_thousand_tables_are_chosen_in_ten_seconds(threads: Any, step: int) -> None:
    """Choices with their bytes, and the knapsack, for a hundred million rows. Lookups and damages
    are given. step: of the thousand each so many-th is taken, in as much less time.
    """
    # a second one would wait for work most of the time, and the processor's clock counts that
    threads(1)
    numbers = range(0, 1000, step)
    names = [f"t{number}" for number in numbers]
    columns = {
        "label": Column(kind="label"),
        **{name: Column(kind="categorical", table=name) for name in names},
    }
    kinds: tuple[Any, ...] = ("hash", "vocabulary")
    encodings = {
        name: Encoding(kind=kinds[n // step % 2], rows=100 + n * n // 3)
        for n, name in zip(numbers, names, strict=True)
    }
    schema, tables = Schema(columns=columns, encodings=encodings), TableChoices()
    run = Run.of("nowhere", {"tables.overrides": [{"where": "rows > 5000", "rule": {"lr": 0.02}}]})
    specs = [tables.spec(name, 16, Numbering.of(encodings[name])) for name in names]
    deadline = Deadline(10 / step, clock=time.process_time)
    counts = (torch.arange(spec.components[0].rows, 0, -1) for spec in specs)
    each = [
        alternatives(run, schema, spec, (2, 4), (), hits_R)
        for spec, hits_R in zip(specs, counts, strict=True)
    ]
    options = []
    for number, of in enumerate(each):
        whole = of[0].bytes.to("train")
        damages = [
            1e-4 * (1 + number % 13) * (whole / max(one.bytes.to("train"), 1) - 1) for one in of
        ]
        options.append(
            [Option(alternative=one, damage=d) for one, d in zip(of, damages, strict=True)]
        )
    whole = sum(of[0].bytes.to("train") for of in each)
    plan = choose_plan(options, whole // 8, "train")
    assert not deadline.over
    assert whole // 9 < plan.bytes <= whole // 8 and sum(map(len, each)) > 30 * len(each)
    assert any("blocks" in one.description for one in each[-1])


def test_a_proposal_that_ends_early_leaves_maps_as_they_were(trained: Path, tmp_path: Path) -> None:
    """Whatever ends it: an earlier plan needs its maps, and nobody needs the new ones."""
    rows, whole = half(restore(trained), "item"), whole_of(restore(trained))
    maps = tmp_path / "maps"

    def stopped(what: str, done: int, total: int) -> None:
        if what == "parts alone":
            raise KeyboardInterrupt

    for earlier in (False, True):
        if earlier:
            maps.mkdir()
            # a new one would have this name
            (maps / f"item-{rows}.map").write_bytes(b"of an earlier plan")
            (maps / "user-9.map").write_bytes(b"another")
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        with pytest.raises(UserError, match="are too few"):
            propose(trained, 10, "train", rows=200, maps=maps, progress=quiet)
        with pytest.raises(KeyboardInterrupt):
            propose(trained, whole - 1, "train", rows=200, maps=maps, progress=stopped)
        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
        assert sorted(tmp_path.iterdir()) == [maps] * earlier
    propose(trained, whole, "train", rows=200, maps=maps, progress=quiet)  # no new plan
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    said = propose(trained, whole - 1, "train", rows=200, trainings=0, maps=maps, progress=quiet)
    needed = [one.alternative.change.get("addressing", {}).get("file") for one in said.plan.options]
    assert sorted(map(str, maps.glob("*"))) == sorted(filter(None, needed))


def test_maps_are_fitted_and_those_of_the_plan_are_kept(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan's maps take the place of an earlier plan's, and its run trains with them."""

    def only_learned(*given: Any) -> list[Alternative]:
        every = alternatives(*given)
        return [
            one
            for one in every
            if one.change.get("addressing", {}).get("name", "learned") == "learned"
        ]

    monkeypatch.setattr("sparrow.apps.smaller.budget.alternatives", only_learned)
    found = restore(trained)
    whole = whole_of(found, "serve")
    maps, told, earlier = tmp_path / "maps", list[str](), list[str]()
    for part in (3, 4):
        said = propose(
            trained,
            whole // part,
            "serve",
            rows=200,
            trainings=0,
            maps=maps,
            progress=lambda what, done, total: told.append(what),
        )
        assert "read training" in told and said.plan.bytes <= whole // part
        files = [
            one.alternative.change.get("addressing", {}).get("file") for one in said.plan.options
        ]
        assert (
            sorted(str(path) for path in maps.glob("*")) == sorted(filter(None, files)) != earlier
        )
        assert list(tmp_path.iterdir()) == [maps]
        earlier = sorted(filter(None, files))
    assert earlier
    Trainer(
        dataclasses.replace(said.plan.run(found.run, str(tmp_path / "run")), loop=Loop(max_steps=2))
    ).fit()


def test_rows_that_share_a_row_of_a_map_become_their_mean(trained: Path, tmp_path: Path) -> None:
    found = restore(trained)
    dataset = data.open(found.run.data.path)
    rows = half(found, "item")
    fit(dataset, "item", rows, quiet).save(tmp_path / "item.map")
    row_R = Map.load(tmp_path / "item.map").row_S.long()
    (one,) = [
        o
        for o in choices_of(found, "item", {"item": [tmp_path / "item.map"]})
        if o.description == f"learned, rows {rows}"
    ]
    torch.manual_seed(0)
    weight_RD = torch.randn(len(row_R), 4)
    there = rebuild_rows(one, weight_RD, torch.ones(len(row_R)))
    for row in row_R.unique():
        torch.testing.assert_close(
            there[row_R == row],
            weight_RD[row_R == row].mean(0).expand(int((row_R == row).sum()), 4),
        )
