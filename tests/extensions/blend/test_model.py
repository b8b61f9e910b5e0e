from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch

from sparrow import data
from sparrow.data.meaning.inference import infer
from sparrow.extensions.blend import model as blend
from sparrow.features.schema import Column, Split
from sparrow.features.transforms import Transforms
from sparrow.trained.run import Run
from sparrow.trained.scorer import restore
from sparrow.training import train
from tests.models.test_models import SCHEMA, build

ROWS = 6000


def log(place: Path, signal: float, rows: int = ROWS) -> Path:
    """Ids with an effect each, a number whose effect is no line, and both together."""
    random = np.random.default_rng(0)
    item, x = random.integers(0, 50, rows), random.normal(size=rows)
    effect = random.normal(size=50)[item] + np.where(np.abs(x) > 0.7, 1.0, -1.0) * np.where(
        item % 2, 1, -1
    )
    click = random.random(rows) < 1 / (1 + np.exp(-signal * effect))
    made = {"item": [f"i{i}" for i in item], "x": x, "label": click.astype(int)}
    pq.write_table(pa.table(made), place / "log.parquet")
    data.prepare([place / "log.parquet"], place / "prepared")
    return place / "prepared"


def run(place: Path, prepared: Path, **changes: Any) -> dict[str, Any]:
    given = {
        "run_dir": str(place / "run"),
        "log.tensorboard": False,
        "loop.epochs": 8,
        "model.name": "blend",
    }
    given |= {"tables.rule.name": "rowwise_adam", "tables.rule.lr": 0.001}
    return train(Run.of(prepared, {**given, **changes}))


STILL = {"dense.lr": 0.0, "tables.rule.lr": 0.0, "loop.epochs": 1}


def heard(place: Path, prepared: Path, **changes: Any) -> str:
    """The notes of a run."""
    given = {
        "run_dir": str(place),
        "log.tensorboard": False,
        "model.name": "blend",
        "tables.rule.name": "rowwise_adam",
    }
    notes: list[str] = []
    train(
        Run.of(prepared, {**given, **changes}),
        listener=lambda event, values: notes.append(values["text"]) if event == "note" else None,
    )
    return "\n".join(notes)


def test_a_small_log(tmp_path: Path) -> None:
    results = run(tmp_path, log(tmp_path, signal=1.5))
    parts, best = results["best"]["parts"], results["best"]["ne"]
    assert best < 0.8 and best <= min(part["ne"] for part in parts.values()) + 0.005
    assert (
        sum(part["weight"] for part in parts.values()) == pytest.approx(1)
        and parts["constant"]["weight"] < 0.2
    )
    assert parts["logistic"]["ne"] > parts["members"]["ne"]  # it knows no pairs
    assert ("trees" in parts) == blend.available()
    restored = restore(tmp_path / "run")
    assert restored.name == "blend"
    rows = pq.read_table(tmp_path / "log.parquet").slice(0, 200)
    twice = [restored.score_rows(rows, batch_size=size) for size in (200, 7)]
    np.testing.assert_allclose(*twice, atol=1e-6)


def test_a_coin_is_not_learned(tmp_path: Path) -> None:
    results = run(tmp_path, log(tmp_path, signal=0.0))
    run_dir = restore(tmp_path / "run")
    test = data.open(tmp_path / "prepared").first(ROWS, "test")
    scores = run_dir.scores(test)[:, 0]
    assert results["best"]["ne"] < 1.02 and float(scores.std()) < 0.08


def test_without_valid_rows_the_members_are_the_model(tmp_path: Path) -> None:
    log(tmp_path, signal=1.5, rows=600)
    data.prepare([tmp_path / "log.parquet"], tmp_path / "all", split=Split(valid=0.0))
    results = run(tmp_path, tmp_path / "all", **{"loop.max_steps": 5})
    assert (results["best"], results["valid"]) == ({}, {})
    assert restore(tmp_path / "run").model.model.weights_PT[:, 0].tolist() == [1, 0, 0]


def test_negatives_that_were_left_out(tmp_path: Path) -> None:
    """Parts are judged by valid rows, which have all their negatives, as the scores of `evaluate`
    are.

    Judged as if they had the negatives of training, what says the base rate alone would have an NE
    of 1.4.
    """
    log(tmp_path, signal=1.5)
    data.prepare([tmp_path / "log.parquet"], tmp_path / "few", split=Split(negatives=0.2))
    results = run(tmp_path, tmp_path / "few")
    parts, best = results["best"]["parts"], results["best"]["ne"]
    assert (
        all(part["ne"] < 1 for name, part in parts.items() if name != "constant")
        and best <= min(p["ne"] for p in parts.values()) + 0.005
    )
    data.prepare(
        [tmp_path / "log.parquet"],
        tmp_path / "more",
        schema=Transforms.load(tmp_path / "run"),
        grow=True,
        split=Split(negatives=0.8),
    )
    warm = {"init_from": str(tmp_path / "run"), "run_dir": str(tmp_path / "next"), "loop.epochs": 1}
    again = run(tmp_path, tmp_path / "more", **warm)
    assert (
        all(part["ne"] < 1 for name, part in again["best"]["parts"].items() if name != "constant")
        and again["best"]["ne"] < best + 0.05
    )


def test_a_log_of_lists_alone(tmp_path: Path) -> None:
    """Trees have nothing to read there."""
    random = np.random.default_rng(0)
    lists = [[f"t{i}" for i in random.integers(0, 9, 3)] for _ in range(800)]
    made = pa.table({"tags": lists, "label": [int("t1" in one) for one in lists]})
    pq.write_table(made, tmp_path / "log.parquet")
    data.prepare([tmp_path / "log.parquet"], tmp_path / "prepared")
    results = run(tmp_path, tmp_path / "prepared", **{"loop.epochs": 2})
    assert (
        list(results["best"]["parts"]) == ["members", "logistic", "constant"]
        and results["best"]["ne"] < 0.8
    )


def test_the_next_day(tmp_path: Path) -> None:
    """Members go on; what is fitted whole is fitted to the new log, whose ids are others and
    more.
    """
    (tmp_path / "next").mkdir()
    run(tmp_path, log(tmp_path, signal=1.5, rows=3000))
    first = restore(tmp_path / "run").model.model
    table = pq.read_table(tmp_path / "log.parquet")
    new = table.set_column(0, "item", pc.replace_substring(table["item"], "i1", "j1"))
    pq.write_table(new, tmp_path / "next" / "log.parquet")
    data.prepare(
        [tmp_path / "next" / "log.parquet"],
        tmp_path / "next" / "prepared",
        schema=Transforms.load(tmp_path / "run"),
        grow=True,
    )
    warm = {
        "init_from": str(tmp_path / "run"),
        "dense.lr": 0.0,
        "tables.rule.lr": 0.0,
        "loop.epochs": 1,
    }
    results = run(tmp_path / "next", tmp_path / "next" / "prepared", **warm)
    second = restore(tmp_path / "next" / "run").model.model
    for one, other in zip(first.members.parameters(), second.members.parameters(), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(first.numbers.knots_CK1, second.numbers.knots_CK1)
    assert len(second.logistic.ids_RT) > len(first.logistic.ids_RT)
    assert results["best"]["parts"]["logistic"]["ne"] < 0.95 and results["best"]["ne"] < 0.85
    whole = data.prepare(
        [tmp_path / "next" / "log.parquet"],
        tmp_path / "next" / "whole",
        schema=Transforms.load(tmp_path / "run"),
        split=Split(valid=0.0),
        grow=True,
    )
    run(tmp_path / "next", whole.out, **warm, run_dir=str(tmp_path / "next" / "third"))
    third = restore(tmp_path / "next" / "third").model.model
    assert torch.equal(first.weights_PT, third.weights_PT) and first.weights_PT[0, 0] < 0.9
    assert torch.equal(first.forest.value_MT, third.forest.value_MT)
    rows = len(first.logistic.ids_RT)
    assert torch.equal(first.logistic.ids_RT, third.logistic.ids_RT[:rows])
    new_RT = third.logistic.ids_RT[rows:]
    # that of unknown ids
    assert len(new_RT) and torch.equal(new_RT, first.logistic.ids_RT[1].expand_as(new_RT))


def test_without_valid_rows_it_is_said_what_becomes_of_the_parts(tmp_path: Path) -> None:
    """They stay where a run goes on, if ids have their numbers; else, and in a first run, the
    members are alone.
    """
    prepared = log(tmp_path, signal=1.5, rows=1200)
    made = run(tmp_path, prepared, **{"loop.epochs": 1})
    logs = {"like": Transforms.load(tmp_path / "run"), "anew": None}
    table = pq.read_table(tmp_path / "log.parquet")
    # of items in another order
    pq.write_table(table.slice(0, 900).sort_by("item"), tmp_path / "less.parquet")
    warm = {"init_from": str(tmp_path / "run"), **STILL}
    said = {}
    for name, schema in logs.items():
        whole = data.prepare(
            [tmp_path / "less.parquet"],
            tmp_path / name,
            schema=schema,
            split=Split(valid=0.0, test=0.0),
        ).out
        for place, given in (("first", STILL), ("next", warm)):
            said[place, name] = heard(tmp_path / f"{place}_{name}", whole, **given)
    kept = restore(tmp_path / "next_like").model.model
    assert list(made["best"]["parts"])[:-1] == list(
        restore(tmp_path / "next_like").model.part_names
    )
    assert torch.equal(kept.weights_PT, restore(tmp_path / "run").model.model.weights_PT)
    stays = (
        f"what was fitted whole stays as in {tmp_path / 'run'}, and so do the weights of members,"
        " logistic"
    )
    assert stays in said["next", "like"]
    alone = "the model is members alone: the log has no valid rows to fit its other parts by"
    assert f"{alone}; prepare it with --valid 0.1" in said["first", "like"]
    assert f"{alone}, and ids that are numbered otherwise" in said["next", "anew"]
    for place in ("first_like", "next_anew"):
        assert restore(tmp_path / place).model.model.weights_PT[:, 0].tolist() == [1, 0, 0]


def test_valid_rows_without_weight_choose_nothing() -> None:
    """As if there were none."""
    model: Any = build(blend.Config(dim=4, number_dim=3, ranges=4, deep=(8,), members=2), SCHEMA)
    model.logistic.bias_T.fill_(1)
    rows = torch.randn(9, 3, 1), torch.ones(9, 1), torch.zeros(9), torch.zeros(1)
    assert [round(part["weight"], 6) for part in model.weigh_parts(*rows).values()] == [
        round(1 / 3, 6)
    ] * 3


def test_parts_get_the_weights_that_are_best() -> None:
    """With many rows the best part gets all; with few, others get a share."""
    model: Any = build(blend.Config(dim=4, number_dim=3, ranges=4, deep=(8,), members=2), SCHEMA)
    assert list(model.has_part.values()) == [True, False, False]  # nothing is fitted yet
    model.logistic.bias_T.fill_(1)
    random, weights = torch.Generator().manual_seed(0), {}
    for rows in (20, 200_000):
        logit_N = torch.randn(rows, generator=random) * 2
        label_N1 = (torch.rand(rows, generator=random) < torch.sigmoid(logit_N)).float()[:, None]
        parts_NPT = torch.stack([logit_N + 3, logit_N, torch.zeros(rows)], 1)[:, :, None]
        told = model.weigh_parts(parts_NPT, label_N1, None, torch.zeros(1))
        assert list(told) == ["members", "logistic", "constant"]  # there are no trees
        weights[rows] = told["logistic"]["weight"]
        assert model.weights_PT[2, 0] == 0
    assert weights[200_000] == 1 and 0.5 <= weights[20] < 1
    ones = torch.ones(200_000)
    assert model.weigh_parts(parts_NPT, label_N1, ones, torch.zeros(1)) == told
    # of rows that lack the label the others say nothing
    lacks = torch.rand(200_000, generator=random) < 0.5
    lacking = torch.where(lacks[:, None], torch.nan, label_N1)
    kept = model.weigh_parts(parts_NPT[~lacks], label_N1[~lacks], ones[~lacks], torch.zeros(1))
    found = model.weigh_parts(parts_NPT, lacking, ones, torch.zeros(1))
    assert all(
        found[name] == pytest.approx(kept[name], rel=1e-9) for name in ("members", "logistic")
    )
    # the offset counts whole, whatever the weights are
    halves = parts_NPT + torch.tensor([0, -0.5, 0])[None, :, None]
    shifted = model.weigh_parts(halves, label_N1, None, torch.tensor([0.5]))
    assert shifted["logistic"]["weight"] == 1
    none = model.weigh_parts(parts_NPT, torch.full_like(label_N1, torch.nan), None, torch.zeros(1))
    assert [round(part["weight"], 6) for part in none.values()] == [round(1 / 3, 6)] * 3


@pytest.mark.parametrize("seed", range(5))
def test_few_positives_do_not_lift_a_part_by_chance(seed: int) -> None:
    """Scores that say nothing of 8 positives count little, as they do of 800; scores that say
    something count.
    """
    model: Any = build(blend.Config(dim=4, number_dim=3, ranges=4, deep=(8,), members=2), SCHEMA)
    model.logistic.bias_T.fill_(1)
    random = torch.Generator().manual_seed(seed)
    for rows in (2_000, 200_000):
        label_N1 = (torch.arange(rows) < rows // 250).float()[:, None]
        noise_NP = torch.randn(rows, 2, generator=random) * 0.5
        for signal in (0.0, 2.0):
            parts_NPT = torch.cat(
                [noise_NP + signal * (label_N1 - 0.004), torch.zeros(rows, 1)], 1
            )[:, :, None]
            model.weigh_parts(parts_NPT, label_N1, None, torch.tensor([-5.5]))
            kept = float(model.weights_PT.sum())
            assert kept > 0.8 if signal else kept < 0.2


def test_a_label_that_rows_lack_is_no_less_learned(tmp_path: Path) -> None:
    """All parts of a blend learn from the rows that have it."""
    log(tmp_path, signal=1.5)
    rows = pq.read_table(tmp_path / "log.parquet")
    label, known = rows["label"].to_numpy(), np.random.default_rng(1).random(ROWS) < 0.7
    rows = rows.append_column("other", pa.array(np.where(known, label, np.nan)))
    pq.write_table(rows, tmp_path / "two.parquet")
    schema = infer([tmp_path / "two.parquet"], "label")
    schema = dataclasses.replace(schema, columns={**schema.columns, "other": Column(kind="label")})
    data.prepare([tmp_path / "two.parquet"], tmp_path / "two", schema=schema)
    results = run(tmp_path, tmp_path / "two", **{"model.members": 2})
    assert results["best"]["other.examples"] < results["best"]["examples"]
    assert results["best"]["other.ne"] < 0.85 and results["best"]["ne"] < 0.85
    scores = restore(tmp_path / "run").model.model.weights_PT
    assert bool(scores.isfinite().all())
