from __future__ import annotations

import dataclasses
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from sparrow import checkpoint, data
from sparrow.cli import main
from sparrow.core import UserError
from sparrow.embeddings import TableChoices
from sparrow.embeddings.addressing import quotient_remainder
from sparrow.embeddings.choices import Override
from sparrow.extensions.low_precision.callback import RoundedWeights
from sparrow.extensions.warm_start.warm_start import warm_start
from sparrow.features.hashing import hash_ids
from sparrow.features.rows import batches
from sparrow.features.schema import Column, Encoding, Schema, Split
from sparrow.features.transforms import Transforms
from sparrow.kernels.formats import int8
from sparrow.kernels.philox import key_of
from sparrow.kernels.rules import rowwise_adagrad, sgd
from sparrow.layers.precision import Precision
from sparrow.models import dcnv2, dlrm
from sparrow.numerics.rounding import noise, to_bf16
from sparrow.optimizers import adam
from sparrow.optimizers import sgd as dense_sgd
from sparrow.trained.build import tables_of
from sparrow.trained.dense import optimizer_state
from sparrow.trained.run import Data, Log, Loop, Run
from sparrow.trained.scorer import restore
from sparrow.training import Trainer, train
from tests.runs import small_run

SCHEMA = Schema(
    columns={
        "user": Column(kind="categorical", table="user"),
        "item": Column(kind="categorical", table="item"),
        "page": Column(kind="categorical", table="page"),
        "price": Column(kind="numeric"),
        "age": Column(kind="categorical", quantiles=4, table="age"),
        "click": Column(kind="label"),
    },
    encodings={
        "user": Encoding(kind="vocabulary", min_count=1),
        "item": Encoding(kind="range"),
        "page": Encoding(kind="hash", rows=64),
        "age": Encoding(),
    },
    split=Split(by="ratio", valid=0.1, test=0.1),
)
FIELDS = ("weight", "sum", "touched")


def day(path: Path, users: range, items: range, seed: int) -> Path:
    """A log of 2000 rows; of users, items and pages that others of these have in part."""
    random = np.random.default_rng(seed)
    user, item = random.choice(users, 2000), random.choice(items, 2000)
    item[:20] = np.resize([items[0], items[-1]], 20)  # so that training sees both ends
    columns = {
        "user": [f"u{i}" for i in user],
        "item": item,
        "page": [f"p{i}" for i in random.integers(0, 40, 2000)],
        "price": random.normal(seed, seed, 2000),
        "age": random.normal(seed, seed, 2000),
        "click": (random.random(2000) < 0.2 + 0.6 * (user % 2)).astype(np.int64),
    }
    pq.write_table(pa.table(columns), path)
    return path


@dataclass(frozen=True)
class World:
    """Three prepared logs: of the first day; of the second like the first, grown; of the second on
    its own.
    """

    root: Path

    @property
    def first_run(self) -> Path:
        return self.root / "run"

    def run(self, log: str, run_dir: Path, /, **changes: Any) -> Run:
        return small_run(self.root / log, run_dir, batch_size=128, **changes)

    def begun(self, log: str, run_dir: Path, /, **changes: Any) -> tuple[Trainer, list[str]]:
        """A trainer that has what the first run learnt and made no step, and what it said."""
        said: list[str] = []
        trainer = Trainer(self.run(log, run_dir, **{"init_from": str(self.first_run), **changes}))
        warm_start(
            trainer.job.model,
            trainer.job.optimizer,
            trainer.job.run,
            trainer.job.dataset,
            said.append,
        )
        return trainer, said


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    root = tmp_path_factory.mktemp("days")
    found = World(root)
    one = day(root / "one.parquet", range(60), range(100, 180), 1)
    two = day(root / "two.parquet", range(30, 100), range(90, 210), 2)
    data.prepare([one], root / "first", schema=SCHEMA)
    train(found.run("first", found.first_run, loop=Loop(epochs=2, evaluate_every=5)))
    data.prepare([two], root / "grown", schema=Transforms.load(found.first_run), grow=True)
    data.prepare([two], root / "own", schema=SCHEMA)
    return found


def saved(run_dir: Path) -> tuple[checkpoint.Checkpoint, dict[str, dict[str, torch.Tensor]]]:
    """The best checkpoint of a run and its tables' fields."""
    directory = run_dir / "checkpoints"
    found = checkpoint.load(directory, checkpoint.latest(directory, best=True))
    parts: dict[str, dict[str, list[torch.Tensor]]] = {}
    for chunk in found.chunks():
        for name, values in chunk.fields.items():
            parts.setdefault(chunk.table, {}).setdefault(name, []).append(values)
    return found, {
        table: {k: torch.cat(v) for k, v in fields.items()} for table, fields in parts.items()
    }


def held(trainer: Trainer) -> dict[str, dict[str, torch.Tensor]]:
    """Copies of the fields of a model's tables."""
    records = [record for tables in tables_of(trainer.job.model) for record in tables.all_records()]
    return {
        record.component.name: {k: v.clone() for k, v in record.fields.items()}
        for record in records
    }


def users(transforms: Transforms, numbers: range) -> np.ndarray:
    return transforms.vocabularies["user"].rows_of(hash_ids(pa.array([f"u{i}" for i in numbers])))


def items(transforms: Transforms, numbers: range) -> np.ndarray:
    low = transforms.schema.encodings["item"].low
    assert low is not None
    return np.array(numbers) - low + 2


def of_rows(fields: dict[str, torch.Tensor], rows: np.ndarray) -> dict[str, torch.Tensor]:
    return {name: values[torch.from_numpy(rows)] for name, values in fields.items()}


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[k], two[k]) for k in one)


@pytest.mark.parametrize("log", ["grown", "own"])
def test_known_ids_keep_their_rows_and_new_ones_are_fresh(
    world: World, tmp_path: Path, log: str
) -> None:
    """With vocabulary and range grown, and with both numbered otherwise: the range's low is
    another, too.
    """
    then = Transforms.load(world.first_run)
    trainer, said = world.begun(log, tmp_path / "warm")
    now = trainer.job.dataset.transforms
    assert now.schema.encodings["item"].low == (100 if log == "grown" else 90)
    assert now.schema.encodings["item"].high == 209
    assert then.schema.encodings["item"].high == 179
    got, fresh = held(trainer), held(Trainer(world.run(log, tmp_path / "fresh")))
    was, old = saved(world.first_run)
    assert set(old["user"]) == set(FIELDS)
    ids = users(then, range(30, 60)), users(now, range(30, 60))
    assert min(*ids[0], *ids[1]) >= 2
    if log == "own":
        assert not np.array_equal(*ids)
    assert same(of_rows(got["user"], ids[1]), of_rows(old["user"], ids[0]))
    assert of_rows(got["user"], ids[1])["sum"].all()
    new = users(now, range(60, 100))
    assert min(new) >= 2
    assert same(of_rows(got["user"], new), of_rows(fresh["user"], new))
    rows = items(then, range(100, 180)), items(now, range(100, 180))
    assert same(of_rows(got["item"], rows[1]), of_rows(old["item"], rows[0]))
    unseen = items(now, range(180, 210) if log == "grown" else range(90, 100))
    assert same(of_rows(got["item"], unseen), of_rows(fresh["item"], unseen))
    for table, special in (("user", [0, 1]), ("item", [0, 1])):  # missing and unknown
        assert same(of_rows(got[table], np.array(special)), of_rows(old[table], np.array(special)))
    assert same(got["page"], old["page"])
    assert same(dict(trainer.job.model.state_dict()), was.part("dense"))
    optimizer = optimizer_state(trainer.job.model, trainer.job.optimizer)
    assert same(
        {":".join(names): values for names, values in optimizer.items()}, was.part("optimizer")
    )
    if log == "grown":
        carried = 62 + 82 + 64 + (now.schema.encodings["age"].rows or 0)
        total = sum(table.rows or 0 for table in now.schema.encodings.values())
        assert said == [
            f"begun with {world.first_run}, step {was.step}: {carried} of {total} table rows come"
            " from there"
        ]
    else:
        assert said[1:] == [
            f"{name}: standardised or bucketed otherwise than in {world.first_run}; "
            f"`sparrow prepare --like {world.first_run} --grow` keeps it as it was"
            for name in ("price", "age")
        ]


def test_before_a_step_it_predicts_what_the_first_run_did(world: World, tmp_path: Path) -> None:
    raw = pq.read_table(world.root / "one.parquet")
    trainer, _ = world.begun("grown", tmp_path / "warm")
    table = trainer.job.dataset.transforms.transform(raw, training=False)
    with torch.no_grad():
        got = torch.cat(
            [trainer.evaluator.score(b) for b in batches(trainer.job.dataset.schema, table, 8192)]
        )
    torch.testing.assert_close(
        got.numpy(), restore(world.first_run).score_rows(raw), rtol=0, atol=0
    )


@pytest.mark.parametrize("kept", [0.25, 1.0])
def test_a_log_with_another_share_of_negatives(world: World, tmp_path: Path, kept: float) -> None:
    """Corrected scores stay what they were: the offset is learned for one share and moves to the
    other.
    """
    like = Transforms.load(world.first_run)
    sampled = dataclasses.replace(like.schema.split, negatives=kept)
    data.prepare(
        [world.root / "two.parquet"], tmp_path / "log", schema=like, grow=True, split=sampled
    )
    run = dataclasses.replace(
        world.run("first", tmp_path / "warm"), data=Data(path=str(tmp_path / "log"))
    )
    trainer, said = Trainer(dataclasses.replace(run, init_from=str(world.first_run))), []
    warm_start(
        trainer.job.model, trainer.job.optimizer, trainer.job.run, trainer.job.dataset, said.append
    )
    raw = pq.read_table(world.root / "one.parquet")
    table = trainer.job.dataset.transforms.transform(raw, training=False)
    with torch.no_grad():
        got = torch.cat(
            [trainer.evaluator.score(b) for b in batches(trainer.job.dataset.schema, table, 8192)]
        )
    torch.testing.assert_close(
        got.numpy(), restore(world.first_run).score_rows(raw), rtol=1e-5, atol=0
    )
    moved = [text for text in said if "negatives" in text]
    assert moved == (
        ["0.25 of the negatives are kept, 1 were there: logits move by +1.386"] if kept < 1 else []
    )


def test_what_it_learnt_is_there_after_training_too(world: World, tmp_path: Path) -> None:
    """With the learning rates at 0 nothing moves: the whole way through `train` keeps the rows."""
    still = {
        "tables": dataclasses.replace(
            world.run("first", tmp_path).tables, rule=rowwise_adagrad.Config(lr=0.0)
        ),
        "dense": adam.Config(lr=0.0),
    }
    run = world.run(
        "grown", tmp_path / "warm", init_from=str(world.first_run), loop=Loop(max_steps=2), **still
    )
    assert train(run)["step"] == 2
    then, now = Transforms.load(world.first_run), Transforms.load(tmp_path / "warm")
    _, old = saved(world.first_run)
    _, new = saved(tmp_path / "warm")
    rows = users(then, range(60)), users(now, range(60))
    assert torch.equal(new["user"]["weight"][rows[1]], old["user"]["weight"][rows[0]])


def test_a_warm_run_begins_better(world: World, tmp_path: Path) -> None:
    loop = Loop(max_steps=1)
    cold = train(world.run("grown", tmp_path / "cold", loop=loop))
    warm = train(world.run("grown", tmp_path / "warm", loop=loop, init_from=str(world.first_run)))
    assert warm["valid"]["logloss"] < cold["valid"]["logloss"]


def test_weights_that_were_split_come_whole(world: World, tmp_path: Path) -> None:
    """To a run that keeps them otherwise, too: it would begin with high halves, which are cut
    off.
    """
    first = tmp_path / "before"
    train(world.run("first", first, loop=Loop(max_steps=4), precision=Precision(weights="split")))
    found, _ = saved(first)
    dense, lows = found.part("dense"), found.part("optimizer")
    for weights in ("fp32", "split", "bf16"):
        precision = Precision(weights=weights)  # type: ignore[arg-type]
        trainer, _ = world.begun(
            "grown", tmp_path / weights, init_from=str(first), precision=precision
        )
        trainer.callbacks.member(RoundedWeights).begin()  # as a run does when it begins
        names = {parameter: name for name, parameter in trainer.job.model.named_parameters()}
        for weight in trainer.job.dense:
            name = names[weight]
            high, low = dense[name].view(torch.int32), lows[f"{name}:low"].to(torch.int32) & 0xFFFF
            assert low.any() and not (high & 0xFFFF).any()
            whole, state = (high | low).view(torch.float32), trainer.job.optimizer.state[weight]
            assert ("low" in state) == (weights == "split")
            if weights == "split":
                assert torch.equal(state["low"].to(torch.int32) & 0xFFFF, low)
            want = {
                "fp32": whole,
                "split": high.view(torch.float32),
                "bf16": whole.bfloat16().float(),
            }[weights]
            assert torch.equal(weight.detach(), want)


def test_a_run_can_go_on_in_its_own_place(world: World, tmp_path: Path) -> None:
    """It is read before what it left is dropped."""
    place = tmp_path / "run"
    shutil.copytree(world.first_run, place)
    _, old = saved(place)
    still = {
        "tables": dataclasses.replace(
            world.run("first", place).tables, rule=rowwise_adagrad.Config(lr=0.0)
        ),
        "loop": Loop(max_steps=1),
    }
    train(world.run("grown", place, init_from=str(place), **still), overwrite=True)
    found, new = saved(place)
    assert found.step == 1
    assert torch.equal(new["page"]["weight"], old["page"]["weight"])


class Kill(Exception):
    """Stands for a death in the middle of a step."""


def test_resumed_it_does_not_begin_again(world: World, tmp_path: Path) -> None:
    said: list[str] = []

    def dies(event: str, values: dict[str, Any]) -> None:
        if event == "progress" and values["step"] >= 9:
            raise Kill

    def listens(event: str, values: dict[str, Any]) -> None:
        said.extend(str(value) for value in values.values())

    earlier = tmp_path / "earlier"
    shutil.copytree(world.first_run, earlier)
    changes = {"init_from": str(earlier), "log": Log(every=1, tensorboard=False)}
    train(world.run("grown", tmp_path / "whole", **changes), listener=listens)
    assert any("begun with" in text for text in said)
    said.clear()
    with pytest.raises(Kill):
        train(world.run("grown", tmp_path / "cut", **changes), listener=dies)
    assert checkpoint.latest(tmp_path / "cut" / "checkpoints") == 8
    shutil.rmtree(earlier)  # is not needed any more
    train(world.run("grown", tmp_path / "cut", **changes), resume=True, listener=listens)
    assert not any("begun with" in text for text in said)
    one, two = saved(tmp_path / "whole"), saved(tmp_path / "cut")
    assert one[0].step == two[0].step
    assert all(same(one[1][table], two[1][table]) for table in one[1])
    assert same(one[0].part("dense"), two[0].part("dense"))


# -- other formats ---------------------------------------------------------------------------------


def choices(**stored: Any) -> TableChoices:
    return TableChoices(rule=rowwise_adagrad.Config(lr=0.1), **stored)


@pytest.mark.parametrize("log", ["grown", "own"])
def test_rows_are_converted_to_another_format(world: World, tmp_path: Path, log: str) -> None:
    """fp32 to int8 and state to bf16, as update 0 rounds the rows that ids have now; then back, to
    what is decoded.
    """
    stored = choices(
        overrides=(Override(names=("user", "item"), format={"name": "int8"}, state="bf16"),)
    )
    trainer, said = world.begun(log, tmp_path / "warm", tables=stored)
    converted = "rows converted from fp32 to int8 and state converted from fp32 to bf16"
    assert said[:2] == [f"user: {converted}", f"item: {converted}"]
    assert not any("converted" in text for text in said[2:])
    _, old = saved(world.first_run)
    got, then, now = held(trainer), Transforms.load(world.first_run), trainer.job.dataset.transforms
    key = key_of(trainer.job.run.seed, "user")
    was, rows = (torch.from_numpy(users(t, range(30, 60))) for t in (then, now))
    values_UD = old["user"]["weight"][was]
    encoded = int8.Config().encode(values_UD, noise(key, 0, rows, (0, 4), 0))["weight"]
    assert torch.equal(got["user"]["weight"][rows], encoded)
    sums_U1 = to_bf16(old["user"]["sum"][was][:, None], noise(key, 1, rows, (0, 1), 0))
    assert torch.equal(got["user"]["sum"][rows], sums_U1[:, 0])
    assert torch.equal(got["user"]["touched"][rows], old["user"]["touched"][was])
    assert same(got["page"], old["page"])
    record = trainer.job.tables[0].record("user")
    step_U1 = (values_UD.amax(1, keepdim=True) - values_UD.amin(1, keepdim=True)) / 255
    assert ((record.weight[rows] - values_UD).abs() <= step_U1 * 1.001).all()


def test_rows_are_decoded_where_fp32_follows(world: World, tmp_path: Path) -> None:
    """A run in int8 with its state in bf16 is followed by one in fp32 on the same log and on one
    numbered otherwise.
    """
    narrow = choices(format=int8.Config(), state="bf16")
    train(world.run("first", tmp_path / "narrow", tables=narrow, loop=Loop(max_steps=8)))
    _, old = saved(tmp_path / "narrow")
    for log in ("first", "own"):
        trainer, said = world.begun(log, tmp_path / log, init_from=str(tmp_path / "narrow"))
        assert (
            said[0]
            == "user: rows converted from int8 to fp32 and state converted from bf16 to fp32"
        )
        got = held(trainer)
        was, rows = (
            users(t, range(30, 60))
            for t in (Transforms.load(tmp_path / "narrow"), trainer.job.dataset.transforms)
        )
        assert torch.equal(got["user"]["weight"][rows], int8.Config().decode(old["user"], 4)[was])
        assert torch.equal(got["user"]["sum"][rows], old["user"]["sum"][was].float())
        assert old["user"]["sum"].dtype == torch.bfloat16
    raw = pq.read_table(world.root / "one.parquet")
    trainer, _ = world.begun("first", tmp_path / "again", init_from=str(tmp_path / "narrow"))
    table = trainer.job.dataset.transforms.transform(raw, training=False)
    with torch.no_grad():
        found = torch.cat(
            [trainer.evaluator.score(b) for b in batches(trainer.job.dataset.schema, table, 8192)]
        )
    torch.testing.assert_close(
        found.numpy(), restore(tmp_path / "narrow").score_rows(raw), rtol=0, atol=0
    )


def test_a_run_goes_on_in_another_format(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the command line: the converted run trains, and its first steps are no worse than those of
    a fresh one.
    """
    command = [
        "train",
        str(world.root / "grown"),
        "--data.batch_size",
        "128",
        "--model.name",
        "dlrm",
        "--model.dim",
        "4",
    ]
    command += [
        "--model.bottom",
        "[8]",
        "--model.top",
        "[8]",
        "--tables.format.name",
        "int8",
        "--tables.state",
        "bf16",
    ]
    assert (
        main([*command, "--run_dir", str(tmp_path / "warm"), "--init_from", str(world.first_run)])
        == 0
    )
    printed = capsys.readouterr()
    assert "age: rows converted from fp32 to int8 and state converted" in " ".join(
        (printed.out + printed.err).split()
    )
    other = ["--run_dir", str(tmp_path / "warm"), "--resume", "--tables.format.name", "fp16"]
    assert main([*command[:-4], *other]) == 2
    told = capsys.readouterr().err
    assert (
        ".format is 'int8' there and 'fp16' here; restore the setting or begin another run_dir"
        in told
    )


def test_a_log_with_fewer_ids_than_the_one_before(world: World, tmp_path: Path) -> None:
    three = day(tmp_path / "three.parquet", range(50, 60), range(100, 120), 2)
    data.prepare([three], tmp_path / "few", schema=SCHEMA)
    trainer, _ = world.begun(str(tmp_path / "few"), tmp_path / "warm")
    then, now = Transforms.load(world.first_run), trainer.job.dataset.transforms
    assert now.vocabularies["user"].rows < then.vocabularies["user"].rows
    _, old = saved(world.first_run)
    was, rows = users(then, range(50, 60)), users(now, range(50, 60))
    assert same(of_rows(held(trainer)["user"], rows), of_rows(old["user"], was))


# -- refused ---------------------------------------------------------------------------------------


def test_a_missing_run_is_refused(world: World, tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"^init_from: .*nowhere is not a run directory .*`sparrow train`"
    ):
        train(world.run("grown", tmp_path / "warm", init_from=str(tmp_path / "nowhere")))
    with pytest.raises(UserError, match=r"first is not a run directory"):
        train(world.run("grown", tmp_path / "warm", init_from=str(world.root / "first")))
    shutil.copytree(world.first_run, tmp_path / "begun")
    shutil.rmtree(tmp_path / "begun" / "checkpoints")
    with pytest.raises(UserError, match=r"^.*begun.*checkpoint") as error:
        train(world.run("grown", tmp_path / "warm", init_from=str(tmp_path / "begun")))
    assert "\n" not in str(error.value)


OTHERS: dict[str, dict[str, Any]] = {
    "model": {"model": dcnv2.Config(dim=4)},
    "model ": {"model": dlrm.Config(dim=8, bottom=(8,), top=(8,))},
    "rule rowwise_adagrad for table": {"tables": TableChoices(rule=sgd.Config(lr=0.1))},
    "dense optimizer": {"dense": dense_sgd.Config(lr=0.1)},
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_model_is_refused(world: World, tmp_path: Path, name: str) -> None:
    with pytest.raises(
        UserError, match=rf"^init_from: .* has {name.strip()} .*and this run .*; use the same$"
    ):
        world.begun("grown", tmp_path / "warm", **OTHERS[name])


def prepared(world: World, tmp_path: Path, **changes: Any) -> str:
    """The second day's log with some columns or tables otherwise: its place from the root."""
    schema = dataclasses.replace(
        SCHEMA,
        columns=SCHEMA.columns | changes.get("columns", {}),
        encodings=SCHEMA.encodings | changes.get("tables", {}),
    )
    data.prepare([world.root / "two.parquet"], tmp_path / "other", schema=schema)
    return str(tmp_path / "other")


@pytest.mark.parametrize(
    ("table", "told"),
    [
        (
            {"page": Encoding(kind="hash", rows=128)},
            "'page': hash of 64 rows then, hash of 128 now",
        ),
        (
            {"item": Encoding(kind="vocabulary")},
            r"'item': range of 82 rows then, vocabulary of \d+ now",
        ),
        (
            {"user": Encoding(kind="hash", rows=62)},
            "'user': vocabulary of 62 rows then, hash of 62 now",
        ),
    ],
)
def test_tables_that_are_numbered_otherwise_are_refused(
    world: World, tmp_path: Path, table: dict[str, Encoding], told: str
) -> None:
    log = prepared(world, tmp_path, tables=table)
    with pytest.raises(
        UserError, match=rf"^init_from: table {told}; prepare the log with --like .*--grow$"
    ):
        world.begun(log, tmp_path / "warm")


@pytest.mark.parametrize(
    ("columns", "what"),
    [
        ({"price": Column(kind="ignore")}, "dense columns"),
        ({"page": Column(kind="categorical", table="user")}, "features"),
        ({"second": Column(kind="label", source="click")}, "labels"),
    ],
)
def test_other_columns_are_refused(
    world: World, tmp_path: Path, columns: dict[str, Column], what: str
) -> None:
    log = prepared(world, tmp_path, columns=columns)
    with pytest.raises(UserError, match=rf"^init_from: .* has {what} .*; use the same$"):
        world.begun(log, tmp_path / "warm")


# -- sizes of addressings --------------------------------------------------------------------------


def addressed(**overrides: dict[str, Any]) -> TableChoices:
    made = tuple(Override(names=(name,), addressing=of) for name, of in overrides.items())
    return TableChoices(rule=rowwise_adagrad.Config(lr=0.1), overrides=made)


SIZED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "quotient_remainder": ({"collisions": 4}, {"sizes": [16], "parts": 2}),
    "coprime": ({"sizes": [16, 9]}, {}),
    "cut": ({"fraction": 0.5}, {"rows": 31}),
    "mixed_dimension": ({"alpha": 0.6, "blocks": 3}, {}),
    "hashed": ({}, {"rows": 62}),
}


@pytest.mark.parametrize("member", SIZED)
def test_sizes_stay_when_the_log_grows(world: World, tmp_path: Path, member: str) -> None:
    settings, written = SIZED[member]
    tables = addressed(user={"name": member, **settings})
    first = dataclasses.replace(world.run("first", tmp_path / "first"), tables=tables)
    train(first)
    settled = Run.load(tmp_path / "first" / "run.toml").tables.sizes
    assert written.items() <= settled.get("user", {}).items() and set(settled) <= {"user"}
    trainer, _ = world.begun(
        "grown", tmp_path / "warm", tables=tables, init_from=str(tmp_path / "first")
    )
    assert trainer.job.run.tables.sizes == settled
    now, then = trainer.job.dataset.transforms, Transforms.load(world.first_run)
    assert now.schema.encodings["user"].rows > then.schema.encodings["user"].rows == 62  # type: ignore[operator]
    raw = pq.read_table(world.root / "one.parquet")
    table = now.transform(raw, training=False)
    with torch.no_grad():  # the log before is scored as by the run before
        got = torch.cat([trainer.evaluator.score(b) for b in batches(now.schema, table, 8192)])
    torch.testing.assert_close(
        got.numpy(), restore(tmp_path / "first").score_rows(raw), rtol=0, atol=0
    )
    train(dataclasses.replace(trainer.job.run, loop=Loop(max_steps=5)))
    again = Trainer(
        dataclasses.replace(trainer.job.run, tables=tables, loop=Loop(max_steps=6)), resume=True
    )
    assert again.job.run.tables.sizes == settled
    train(dataclasses.replace(trainer.job.run, tables=tables, loop=Loop(max_steps=6)), resume=True)


def test_a_table_that_grows_over_a_threshold_stays_as_it_was(world: World, tmp_path: Path) -> None:
    tables = TableChoices(
        rule=rowwise_adagrad.Config(lr=0.1),
        overrides=(Override(where="rows > 90", addressing={"name": "hashed"}),),
    )
    trainer, _ = world.begun("grown", tmp_path / "warm", tables=tables)
    assert trainer.job.run.tables.sizes == {"user": {"name": "direct"}, "item": {"name": "direct"}}
    fresh = Trainer(world.run("grown", tmp_path / "fresh", tables=tables))
    assert set(fresh.job.run.tables.sizes) == {"user", "item"}
    assert fresh.job.run.tables.sizes["user"]["name"] == "hashed"


def test_an_addressing_that_cannot_grow_is_refused(world: World, tmp_path: Path) -> None:
    for settings, told in (
        (
            {"name": "path", "rows": 16},
            (
                "table 'user' is addressed otherwise .*; keep that: .'name': 'path', .*; a path"
                " that needs another"
            ),
        ),
        (
            {"name": "coprime", "sizes": [8, 9]},
            "table 'user': sizes: 8 x 9 tell 72 ids apart, and there are 1",
        ),
    ):
        tables, place = addressed(user=settings), tmp_path / str(settings["name"])
        train(world.run("first", place, tables=tables, loop=Loop(max_steps=2)))
        with pytest.raises(UserError, match=told):
            world.begun("grown", tmp_path / "warm", tables=tables, init_from=str(place))


def test_another_addressing_on_the_command_line_drops_the_settled_sizes(
    world: World, tmp_path: Path
) -> None:
    tables = TableChoices(
        addressing=quotient_remainder.Config(), rule=rowwise_adagrad.Config(lr=0.1)
    )
    place = tmp_path / "run"
    with pytest.raises(UserError, match="table 'page': the log's ids are hashes; set fold = true"):
        train(world.run("first", place, tables=tables))
    folded = dataclasses.replace(tables, addressing=quotient_remainder.Config(fold=True))
    train(world.run("first", place, tables=folded, loop=Loop(max_steps=2)))
    assert Run.load(place / "run.toml").tables.sizes["user"]["sizes"] == [16]
    assert not Run.load(place / "run.toml", {"tables.addressing.collisions": 8}).tables.sizes


# -- by the command line ---------------------------------------------------------------------------


def test_the_commands(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two, run, log = world.root / "two.parquet", str(world.first_run), tmp_path / "day2"
    assert main(["prepare", str(two), "--like", run, "--grow", "--out", str(log)]) == 0
    assert Transforms.load(log).vocabularies["user"].rows == 102
    settings = Run.load(world.first_run / "run.toml")
    bottom = [
        "--model.name",
        "dlrm",
        "--model.dim",
        "4",
        "--model.bottom",
        "[8]",
        "--model.top",
        "[8]",
    ]
    command = [
        "train",
        str(log),
        "--run_dir",
        str(tmp_path / "warm"),
        "--data.batch_size",
        "128",
        *bottom,
    ]
    capsys.readouterr()
    assert main([*command, "--init_from", run]) == 0
    printed = capsys.readouterr()
    assert "table rows come from there" in " ".join((printed.out + printed.err).split())
    assert restore(tmp_path / "warm").run.init_from == run
    assert type(settings.model) is type(restore(tmp_path / "warm").run.model)
    assert main([*command, "--overwrite", "--init_from", str(tmp_path / "none")]) == 2
    assert "sparrow: error: init_from: " in capsys.readouterr().err
