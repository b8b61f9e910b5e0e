"""Sharded = single, end to end: the same commands on many ranks."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from sparrow import data
from sparrow.apps.generate import generate
from sparrow.apps.smaller.learned_hash import fit
from sparrow.data.meaning.inference import infer
from sparrow.distributed import World
from sparrow.extensions.calibration.calibrate import calibrate
from sparrow.features.schema import Column, Encoding
from sparrow.trained.build import build, tables_of
from sparrow.trained.scorer import restore
from tests.data.grouped import SCHEMA, made
from tests.equivalence import cases
from tests.equivalence.pool import Pool
from tests.runs import run_of

pytestmark = pytest.mark.multi
PLANS = (
    "auto",
    "table_wise",
    "row_wise",
    "column_wise",
    "table_row_wise",
    "table_column_wise",
    "grid",
)
SETTINGS: dict[str, Any] = {"data.batch_size": 500, "model.dim": 8, "model.deep": [16]}
SCORES = ("auc", "logloss", "ne", "calibration")
SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Half of what other tests have: five steps."""
    path = tmp_path_factory.mktemp("log") / "log.parquet"
    generate(path, rows=3000, users=60, items=40, categorical=3, numeric=3, seed=5)
    return path


@pytest.fixture(scope="module")
def prepared(log: Path) -> Path:
    data.prepare([log], log.parent / "prepared")
    return log.parent / "prepared"


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log for batches of two and three rows, in which it is judged too."""
    place = tmp_path_factory.mktemp("few")
    generate(place / "log.parquet", rows=300, users=20, items=20, categorical=3, numeric=3, seed=5)
    return data.prepare([place / "log.parquet"], place / "prepared").out


@pytest.fixture(scope="module")
def sessions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log with groups, weights, and a label that rows lack."""
    place, random = tmp_path_factory.mktemp("sessions"), np.random.default_rng(1)
    table = made(150, 4)
    clicks = table["label"].to_numpy()
    bought = np.where(
        (clicks == 1) | (random.random(len(clicks)) < 0.1),
        random.integers(0, 2, len(clicks)),
        np.nan,
    )
    table = table.append_column("bought", pa.array(bought))
    table = table.append_column("importance", pa.array(random.uniform(0.1, 2, len(clicks))))
    pq.write_table(table, place / "log.parquet")
    columns = SCHEMA.columns | {
        "row": Column(kind="numeric"),  # the row as it is drowns all else
        "bought": Column(kind="label"),
        "importance": Column(kind="weight"),
    }
    schema = replace(SCHEMA, columns=columns)
    return data.prepare([place / "log.parquet"], place / "prepared", schema=schema).out


@pytest.fixture(scope="module")
def alone(
    prepared: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}

    def run(**changes: Any) -> dict[str, Any]:
        key = repr(changes)
        if key not in found:
            place = tmp_path_factory.mktemp("alone") / "run"
            before = torch.get_num_threads()
            found[key] = cases.fit(
                World(), str(prepared), str(place), {**SETTINGS, **changes}, False
            )
            torch.set_num_threads(before)
        return found[key]

    return run


def valid_scores(run_dir: str) -> torch.Tensor:
    """Of every row of the valid part, by the last checkpoint."""
    found = restore(run_dir, which="last")
    with torch.no_grad():
        return torch.cat(
            [
                found.scores(batch)
                for batch in data.open(found.run.data.path).loader(500, split="valid")
            ]
        )


def assert_near(got: list[dict[str, Any]], want: dict[str, Any]) -> None:
    """Scores of rows and their metrics to 1e-6, weights to 1e-5 of a matrix's largest: products of
    other shapes and gradients of shares sum in another order, and Adam makes steps of gradients
    whatever their size. An AUC counts pairs of rows: of scores that differ by rounding one pair may
    change places.
    """

    def near(one: dict[str, float], other: dict[str, float]) -> None:
        positives = other["base_rate"] * other["examples"]
        pair = 1 / max(positives * (other["examples"] - positives), 1.0)
        for name in SCORES:
            slack = 1.01 * pair if name == "auc" else 0
            assert one[name] == pytest.approx(other[name], rel=1e-6, abs=slack, nan_ok=True)

    mine_N, other_N = (valid_scores(side["results"]["run_dir"]) for side in (got[0], want))
    torch.testing.assert_close(mine_N, other_N, rtol=1e-6, atol=1e-6)
    for mine in got:
        for one, other in zip(
            mine["results"]["progressive"], want["results"]["progressive"], strict=True
        ):
            near(one, other)
        near(mine["results"]["valid"], want["results"]["valid"])
        for name, value in mine["dense"].items():
            other = want["dense"][name]
            torch.testing.assert_close(
                value, other, rtol=1e-5, atol=1e-5 * float(other.abs().max())
            )
            assert torch.equal(value, got[0]["dense"][name])  # all ranks have the same


@pytest.mark.parametrize(
    "plan",  # the others are those of the tests below
    [pytest.param(of, marks=() if "column" in of or of == "grid" else SLOW) for of in PLANS],
)
def test_training_on_many_ranks_is_training_on_one(
    ranks: Callable[[int], Pool],
    alone: Callable[..., dict[str, Any]],
    prepared: Path,
    tmp_path: Path,
    plan: str,
) -> None:
    changes = {"tables.rule.name": "sgd"} if "column" in plan or plan == "grid" else {}
    got = ranks(4).run(
        cases.fit,
        str(prepared),
        str(tmp_path / "run"),
        {**SETTINGS, **changes, "sharding.plan": plan},
        False,
    )
    assert_near(got, alone(**changes))
    model = restore(tmp_path / "run")  # in one process
    loader = data.open(prepared).loader(500, split="valid")
    from sparrow.metrics import evaluate

    assert evaluate(model.scores, loader)["ne"] == pytest.approx(
        got[0]["results"]["valid"]["ne"], rel=1e-6
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"loop.accumulate": 3, "dense.eps": 1e-6},  # with 1e-8 Adam steps by rounding alone
        pytest.param({"loop.clip_norm": 0.05}, marks=SLOW), {"loop.nonfinite": "off"},
        {"loop.epochs": 2, "data.shuffle": True},
        pytest.param({"model.name": "dlrm", "model.bottom": [8], "model.top": [8]}, marks=SLOW),
        {"data.batch_size": 3, "loop.max_steps": 20},  # fewer samples than ranks
        {"data.id_dropout": {"item": 0.3, "history": 0.5}}, {"model.dropout": 0.4, "data.shuffle": True},
        {"loop.clip_norm": 0.05, "sharding.plan": "one table by rows, copies of the others"},
        {"tables.addressing.name": "dynamic", "tables.addressing.rows": 150, "tables.addressing.after": 2,
         "tables.addressing.bucket": 20},
    ],
    ids=str,
)  # fmt: skip
def test_settings(
    ranks: Callable[[int], Pool],
    alone: Callable[..., dict[str, Any]],
    prepared: Path,
    few: Path,
    tmp_path: Path,
    changes: dict[str, Any],
) -> None:
    settings = {**SETTINGS, **changes}
    prepared = few if "data.batch_size" in changes else prepared
    if "model.name" in changes:
        del settings["model.deep"]
    plan = "row_wise"
    if settings.pop("sharding.plan", ""):
        first = next(iter(data.open(prepared).schema.encodings))
        plan = str(tmp_path / "plan.toml")
        Path(plan).write_text(
            f'default = "data_parallel"\n[layouts.{first}]\nranks = [0, 1, 2, 3]\nrows = 4\n'
        )
    # two hosts where rows go elsewhere for it; else two ranks take half of the time
    size = 4 if {"loop.accumulate", "data.batch_size", "tables.addressing.name"} & {*changes} else 2
    got = ranks(size if plan == "row_wise" else 4).run(
        cases.fit, str(prepared), str(tmp_path / "run"), {**settings, "sharding.plan": plan}, False
    )
    assert_near(got, cases.fit(World(), str(prepared), str(tmp_path / "one"), settings, False))


# (step, batch) -> what is not finite, on which rank alone; the last batch's gradients are DDP's to
# sum
SPOILT = {
    (1, 0): ("loss", 1),
    (3, 1): ("scores", 1),
    (5, 2): ("loss", 0),
    (6, 2): ("scores", 2),
    (8, 0): ("gradient", 1),
    (9, 2): ("gradient", 2),
}


@pytest.mark.parametrize(
    ("size", "accumulate", "batch_size"),
    [  # of a batch of two one of three ranks has nothing
        *((2, 3, 30), (3, 1, 2)),
        *(pytest.param(*of, marks=SLOW) for of in ((2, 1, 30), (3, 3, 2), (3, 3, 30))),
    ],
)
def test_a_step_left_out_is_left_out_on_all_ranks(
    ranks: Callable[[int], Pool],
    prepared: Path,
    few: Path,
    tmp_path: Path,
    size: int,
    accumulate: int,
    batch_size: int,
) -> None:
    """And the steps behind it are those of one process that left it out: two in a row, losses,
    gradients.
    """
    spoilt = {
        (step, batch if accumulate > 1 else 0): what for (step, batch), what in SPOILT.items()
    }
    settings = {
        **SETTINGS,
        "data.batch_size": batch_size,
        "loop.accumulate": accumulate,
        "loop.max_steps": 14,
    }
    # whose steps are as wrong as the gradients
    settings |= {"sharding.plan": "row_wise", "dense.name": "sgd"}
    log = str(few if batch_size == 2 else prepared)
    got = ranks(size).run(cases.fit_spoilt, log, str(tmp_path / "run"), settings, spoilt)
    want = cases.fit_spoilt(World(), log, str(tmp_path / "one"), settings, spoilt_in_one(spoilt))
    assert [one["results"]["skipped_steps"] for one in got] == [len(spoilt)] * size
    assert want["results"]["skipped_steps"] == len(spoilt)
    assert_near(got, want)


def spoilt_in_one(
    spoilt: dict[tuple[int, int], tuple[str, int]],
) -> dict[tuple[int, int], tuple[str, int]]:
    """The same in one process, which is rank 0."""
    return {place: (kind, 0) for place, (kind, _) in spoilt.items()}


@pytest.mark.parametrize(
    ("plan", "model"),
    [
        pytest.param("row_wise", "dcnv2", marks=SLOW),
        ("row_wise", "masknet"),
        ("table_row_wise", "dlrm"),
        ("data_parallel", "dlrm"),
        ("row_wise", "dynamic"),
    ],
)
def test_many_ranks_with_dedup_are_one_without(
    ranks: Callable[[int], Pool], sessions: Path, tmp_path: Path, plan: str, model: str
) -> None:
    settings = {
        **SETTINGS,
        "data.batch_size": 60,
        "data.dedup": "on",
        "sharding.plan": plan,
        "tables.rule.name": "sgd",
        "data.shuffle": plan == "row_wise",
    }
    if model == "dlrm":
        del settings["model.deep"]
    if model == "dynamic":
        settings |= {
            f"tables.addressing.{n}": v
            for n, v in (("name", "dynamic"), ("rows", 40), ("bucket", 10), ("after", 2))
        }
    elif model != "dcnv2":
        settings |= {"model.name": model, "model.history.lists": ["history", "tags"]}
    # Adam divides its gradients that are nearly 0 by roots as small: 2 of 24 seeds fail
    if model == "masknet":
        settings["dense.name"] = "sgd"
    got = ranks(3 if model == "masknet" else 4).run(
        cases.fit, str(sessions), str(tmp_path / "run"), settings, False
    )
    before = torch.get_num_threads()
    want = cases.fit(
        World(),
        str(sessions),
        str(tmp_path / "one"),
        {**settings, "data.dedup": "off"},
        False,
    )
    torch.set_num_threads(before)
    assert_near(got, want)


@pytest.mark.parametrize(
    ("size", "changes"),
    [
        (2, {"loss.weights": {"bought": 3.0}}),
        pytest.param(3, {"loop.accumulate": 3}, marks=SLOW), pytest.param(2, {"loss.name": "pairwise"}, marks=SLOW),
        (3, {"loss.name": "pairwise", "loss.bce": 0.1, "data.shuffle": True}),
        (3, {"loss.name": "listwise", "loss.weights": {"bought": 3.0}, "loop.accumulate": 2}),
    ],
    ids=str,
)  # fmt: skip
def test_losses_of_labels_that_rows_lack(
    ranks: Callable[[int], Pool],
    sessions: Path,
    tmp_path: Path,
    size: int,
    changes: dict[str, Any],
) -> None:
    settings = {
        **SETTINGS,
        "data.batch_size": 60,
        "sharding.plan": "row_wise",
        "dense.name": "sgd",
        **changes,
    }
    got = ranks(size).run(cases.fit, str(sessions), str(tmp_path / "run"), settings, False)
    before = torch.get_num_threads()
    want = cases.fit(World(), str(sessions), str(tmp_path / "one"), settings, False)
    torch.set_num_threads(before)
    assert_near(got, want)
    assert want["results"]["valid"]["bought.examples"] < want["results"]["valid"]["examples"]


@pytest.mark.parametrize(
    "changes", [{}, {"loop.accumulate": 3}, {"loop.nonfinite": "off"}], ids=str
)
def test_nobody_waits_between_forward_and_backward(
    ranks: Callable[[int], Pool], prepared: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    """Neither for other ranks nor, which one process shows too, for a device."""
    settings = {
        **SETTINGS,
        "data.batch_size": 200,
        "sharding.plan": "row_wise",
        "loop.max_steps": 4,
        **changes,
    }
    assert ranks(2).run(cases.waits, str(prepared), str(tmp_path / "two"), settings, False) == [
        [],
        [],
    ]
    if not changes:
        alone = cases.waits(World(), str(prepared), str(tmp_path / "one"), settings, False)
        control = ranks(2).run(
            cases.waits, str(prepared), str(tmp_path / "control"), settings, True
        )
        assert (alone, control) == ([], [["at", "item"]] * 2)


def test_dense_gradients_travel_in_bf16(
    ranks: Callable[[int], Pool],
    alone: Callable[..., dict[str, Any]],
    prepared: Path,
    tmp_path: Path,
) -> None:
    """Rounded to 8 bits, on two ranks once before and once after the sum; and all ranks end with
    the same weights.
    """
    settings = {**SETTINGS, "sharding.dense": "bf16", "dense.name": "sgd"}
    got = ranks(2).run(cases.fit, str(prepared), str(tmp_path / "run"), settings, False)
    want = alone(**{"dense.name": "sgd"})
    apart = []
    for name, value in got[0]["dense"].items():
        assert torch.equal(value, got[1]["dense"][name])
        torch.testing.assert_close(value, want["dense"][name], rtol=0.02, atol=0.02)
        apart.append(not torch.allclose(value, want["dense"][name], rtol=1e-5, atol=1e-5))
    assert any(apart)


@pytest.mark.parametrize("background", [False, True])
def test_resumed_is_uninterrupted(
    ranks: Callable[[int], Pool], prepared: Path, tmp_path: Path, background: bool
) -> None:
    settings = {
        **SETTINGS,
        "checkpoint.every": 2,
        "checkpoint.background": background,
        "sharding.plan": "row_wise",
        "sharding.forward.dtype": "bf16",
        "sharding.dense": "bf16",
    }
    whole = ranks(2).run(cases.fit, str(prepared), str(tmp_path / "whole"), settings, False)
    again = ranks(2).run(cases.fit, str(prepared), str(tmp_path / "again"), settings, True)
    for name, value in whole[0]["dense"].items():
        assert torch.equal(value, again[0]["dense"][name])
    last = max((tmp_path / "whole/checkpoints").glob("step-*"))
    files = list(last.glob("*.safetensors"))
    assert len(files) > 4
    for file in files:
        assert (
            file.read_bytes()
            == (tmp_path / "again/checkpoints" / last.name / file.name).read_bytes()
        )


@pytest.fixture(scope="module")
def fewer(log: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A log, settings of a run with a learned map, blocks of several dims and partitions, and its
    job on one rank.
    """
    place, before = tmp_path_factory.mktemp("fewer"), torch.get_num_threads()
    schema = infer([log])
    encodings = schema.encodings | {"user": Encoding(kind="vocabulary", min_count=1)}
    data.prepare([log], place / "log", schema=replace(schema, encodings=encodings))
    fit(data.open(place / "log"), "item", 15, lambda what, done, total: None, share=0.3).save(
        place / "item.map"
    )
    overrides = [
        {"names": ["item"], "addressing": {"name": "learned", "file": str(place / "item.map")}},
        {"names": ["user"], "addressing": {"name": "mixed_dimension", "blocks": 3, "alpha": 0.6}},
        {
            "names": ["cat_1"],
            "addressing": {"name": "coprime", "operation": "mult", "collisions": 3},
        },
        {
            "names": ["cat_2"],
            "addressing": {"name": "dynamic", "rows": 40, "bucket": 10, "after": 2, "ttl": 1500},
        },
    ]
    settings = {**SETTINGS, "tables.overrides": overrides, "dense.name": "sgd"}
    want = cases.fit(World(), str(place / "log"), str(place / "one"), settings, False)
    torch.set_num_threads(before)
    return {"log": str(place / "log"), "settings": settings, "want": want}


def test_tables_of_fewer_rows_are_those_of_one_process(
    ranks: Callable[[int], Pool], fewer: dict[str, Any], tmp_path: Path
) -> None:
    model = restore(fewer["want"]["results"]["run_dir"]).model
    specs = [spec for tables in tables_of(model) for spec in tables.specs]
    # blocks have several dims
    assert len({part.dim for spec in specs for part in spec.components}) > 2
    for plan, size in (("row_wise", 4), ("table_wise", 2), ("auto", 3)):
        settings = fewer["settings"] | {"sharding.plan": plan}
        got = ranks(size).run(cases.fit, fewer["log"], str(tmp_path / plan), settings, False)
        assert_near(got, fewer["want"])


@pytest.mark.parametrize("size", [1, 2, pytest.param(8, marks=pytest.mark.slow)])
def test_tables_of_fewer_rows_go_on_with_another_number_of_ranks(
    ranks: Callable[[int], Pool], fewer: dict[str, Any], tmp_path: Path, size: int
) -> None:
    settings, run_dir = fewer["settings"] | {"sharding.plan": "row_wise"}, str(tmp_path / "run")
    ranks(4).run(cases.half, fewer["log"], run_dir, settings)
    if size > 1:
        got = ranks(size).run(cases.rest, fewer["log"], run_dir, settings, True)
    else:
        before = torch.get_num_threads()
        got = [cases.rest(World(), fewer["log"], run_dir, settings, True)]
        torch.set_num_threads(before)
    assert_near(got, fewer["want"])


def test_calibrators_of_many_ranks_are_those_that_one_process_fits(
    ranks: Callable[[int], Pool], prepared: Path, tmp_path: Path
) -> None:
    """From the same checkpoint, to the bit; and where rank 0 cannot fit them, no rank waits for
    it.
    """
    command = [
        str(prepared),
        "--run_dir",
        str(tmp_path / "run"),
        "--threads",
        "1",
        "--loop.epochs",
        "1",
        "--model.name",
        "dcnv2",
        "--model.deep",
        "[16]",
        "--data.batch_size",
        "500",
    ]
    command += ["--calibration.method", "isotonic"]
    assert ranks(3).run(cases.commanded, [command] * 3) == [""] * 3
    (path,) = (tmp_path / "run" / "calibrators").iterdir()
    of_ranks, results = (
        path.read_bytes(),
        json.loads((tmp_path / "run" / "results.json").read_text()),
    )
    path.unlink()
    assert calibrate(tmp_path / "run", "isotonic") == results["calibrated"]
    assert path.read_bytes() == of_ranks
    shutil.rmtree(path.parent)
    path.parent.write_text("in the way")
    said = ranks(3).run(cases.commanded, [[*command, "--resume"]] * 3)
    assert f"{path.parent}: cannot be written" in said[0] and said == [said[0]] * 3


@pytest.mark.parametrize(
    ("name", "near"),
    [("bf16-truncate", 1e-4), ("bf16", 0.02), ("mxfp8", 0.02), ("mx9", 0.02)],
    ids=str,
)
def test_a_precision_of_two_ranks_is_that_of_one(
    ranks: Callable[[int], Pool], prepared: Path, tmp_path: Path, name: str, near: float
) -> None:
    """How far two ranks end from one, over how far one step went.

    Shares of 256 rows hold whole blocks, so operands are rounded alike. With fp32 between products,
    sums have another order. With bf16 each rank rounds the gradient of its share.
    """
    settings = {
        **SETTINGS,
        "data.batch_size": 512,
        "dense.name": "sgd",
        "tables.rule.name": "sgd",
        "loop.max_steps": 1,
        "precision": name,
    }
    got = ranks(2).run(cases.fit, str(prepared), str(tmp_path / "two"), settings, False)
    before = torch.get_num_threads()
    want = cases.fit(World(), str(prepared), str(tmp_path / "one"), settings, False)
    torch.set_num_threads(before)
    first = build(
        run_of(prepared, tmp_path / "none", **settings), data.open(prepared).schema
    ).state_dict()
    weights = {name: value for name, value in want["dense"].items() if value.is_floating_point()}
    for weight, value in weights.items():
        assert torch.equal(got[0]["dense"][weight], got[1]["dense"][weight])
        apart, went = (got[0]["dense"][weight] - value).norm(), (value - first[weight]).norm()
        assert apart <= near * went, (weight, float(apart), float(went))
    assert got[0]["results"]["precision"] == want["results"]["precision"]
