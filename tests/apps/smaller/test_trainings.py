"""Short trainings of plans: what they say is what trainings give."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparrow import data
from sparrow.analysis.judge import judges
from sparrow.apps.smaller.alternatives import Alternative, Bytes
from sparrow.apps.smaller.budget import propose
from sparrow.apps.smaller.plans import Option, Plan
from sparrow.apps.smaller.trainings import Verdict, by_training
from sparrow.core import UserError
from sparrow.embeddings import Numbering, TableSpec
from sparrow.embeddings.choices import Override
from sparrow.features.schema import Column, Encoding, Schema, Split
from sparrow.trained.build import tables_of
from sparrow.trained.run import Loop
from sparrow.trained.scorer import restore
from sparrow.training import train
from sparrow.training.preflight import dense_state
from tests.runs import run_of, small_run


def quiet(what: str, done: int, total: int) -> None:
    """Progress that nobody watches."""


def plan_of(run_dir: Path, changes: dict[str, dict[str, Any]]) -> Plan:
    """A plan with these changes of a trained run."""
    found = restore(run_dir)
    specs: list[TableSpec] = [spec for tables in tables_of(found.model) for spec in tables.specs]
    options = []
    for spec in specs:
        change = changes.get(spec.name, {})
        ids = Numbering.of(found.schema.encodings[spec.name])
        own = Override(names=(spec.name,), **change).on(found.run.tables.alone(spec.name, ids.rows))
        then = own.spec(spec.name, spec.dim, ids, spec.init_scale)
        size = Bytes.from_spec(then, dense_state(found.run))
        options.append(
            Option(alternative=Alternative(change=change, spec=then, bytes=size, how="rebuilt"))
        )
    return Plan(options=tuple(options), purpose="train")


def judged(
    run_dir: Path, plans: Sequence[Plan], examples: int, seeds: int, progress: Any = quiet
) -> Verdict:
    run = restore(run_dir).run
    dataset = data.open(run.data.path)
    of_rows = judges(dataset, 300)
    return by_training(
        run, run_dir, dataset, plans, of_rows, examples=examples, seeds=seeds, progress=progress
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, prepared: Path) -> Path:
    run_dir = tmp_path_factory.mktemp("trainings") / "run"
    train(small_run(prepared, run_dir))
    return run_dir


def noisy_log(place: Path, rows: int, seed: int = 0) -> Path:
    """A log whose users say nothing, and of whom each is seen a few times: what their rows learn is
    noise.
    """
    random = np.random.default_rng(seed)
    kind = random.integers(0, 4, rows)
    label = random.random(rows) < np.array([0.1, 0.3, 0.5, 0.8])[kind]
    user, kinds = random.integers(0, rows // 4, rows), np.char.add("k", kind.astype(str))
    table = {
        "label": label.astype(np.int8),
        "user": np.char.add("u", user.astype(str)),
        "kind": kinds,
    }
    pq.write_table(pa.table(table), place / "log.parquet")
    columns: dict[str, Any] = {"label": Column(kind="label")}
    columns |= {name: Column(kind="categorical", table=name) for name in ("user", "kind")}
    encodings = {"user": Encoding(min_count=1), "kind": Encoding()}
    schema = Schema(
        columns=columns, encodings=encodings, split=Split(by="ratio", valid=0.3, test=0.0)
    )
    return data.prepare([place / "log.parquet"], place / "log", schema=schema).out


@pytest.fixture(scope="module", params=[(1000, 8)], ids=str)
def noisy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on such a log. The parameter: its rows, and for how many epochs it is trained."""
    rows, epochs = request.param
    place = tmp_path_factory.mktemp("noisy")
    train(small_run(noisy_log(place, rows), place / "run", batch_size=64, loop=Loop(epochs=epochs)))
    return place / "run"


def test_what_is_said_is_what_trainings_give(noisy: Path, tmp_path: Path) -> None:
    """Also where the best checkpoint is not the last: trainings that read all that the run reads
    are such runs.
    """
    run = restore(noisy).run
    dataset = data.open(run.data.path)
    hashed = plan_of(noisy, {"user": {"addressing": {"name": "hashed", "rows": 50}}})
    verdict = judged(noisy, [hashed], 10**9, seeds=2)
    _, check = judges(dataset, 300)
    steps = []

    def values(tables: Any) -> list[float]:
        found = []
        for seed in (1, 2):
            place = tmp_path / f"again{seed}"
            results = train(
                replace(run, run_dir=str(place), tables=tables, seed=run.seed + seed + 1),
                overwrite=True,
            )
            steps.append((results["best"]["step"], results["step"]))
            found.append(check.ne(restore(place)).value)
        return found

    plain, smaller = values(run.tables), values(hashed.tables(run.tables))
    assert any(best < last for best, last in steps)
    (said,) = verdict.plans
    assert said.damage == pytest.approx(
        statistics.mean(smaller) - statistics.mean(plain), abs=1e-12
    )
    spread = math.sqrt((statistics.variance(plain) + statistics.variance(smaller)) / 2)
    assert verdict.spread == pytest.approx(spread) and said.error >= spread
    assert verdict.share == 1 and said.seeds == 2


def test_a_training_of_the_same_costs_nothing(trained: Path) -> None:
    same, halved = (
        plan_of(trained, {}),
        plan_of(trained, {"user": {"addressing": {"name": "hashed", "rows": 9}}}),
    )
    verdict = judged(trained, [halved, same], 1000, seeds=2)
    of = {len(one.plan.tables(restore(trained).run.tables).overrides): one for one in verdict.plans}
    assert of[0].damage == 0 and of[0].error == pytest.approx(verdict.spread)  # of two seeds each
    assert of[1].damage != 0 and of[1].error > verdict.spread


def test_plans_are_trained_once_and_finalists_again(trained: Path) -> None:
    changes = [
        {"user": {"addressing": {"name": "hashed", "rows": rows}}} for rows in (3, 6, 9, 12, 15)
    ]
    plans = [plan_of(trained, change) for change in changes]
    told: list[tuple[int, int]] = []
    verdict = judged(
        trained, plans, 1000, seeds=2, progress=lambda what, done, total: told.append((done, total))
    )
    # one of each and of the run as it is, and two of these and of three
    assert told[-1] == (14, 14)
    assert [one.seeds for one in verdict.plans] == [2, 2, 2, 1, 1]
    assert {id(one.plan) for one in verdict.plans} == {id(plan) for plan in plans}
    steps = math.ceil(data.open(restore(trained).run.data.path).rows() / 256)
    assert verdict.share == pytest.approx(4 / steps)  # of 256 rows each
    assert not list(trained.parent.glob(".*"))


def test_plans_that_cannot_be_trained_are_left_out(noisy: Path) -> None:
    """Whether they fall out at first, or as finalists. Where none is left, the reason is told."""
    diverging = plan_of(noisy, {"user": {"rule": {"lr": 1e38}}})
    fine = [
        plan_of(noisy, {"user": {"addressing": {"name": "hashed", "rows": rows}}})
        for rows in (3, 9, 27)
    ]
    for others, seeds in ((fine, [2, 2, 2]), (fine[:1], [2])):
        verdict = judged(noisy, [diverging, *others], 1000, seeds=2)
        assert [one.seeds for one in verdict.plans] == seeds
        (failure,) = verdict.failures
        assert failure.startswith("mixed, ") and "the model diverged" in failure
    with pytest.raises(UserError, match="no plan can be trained: mixed, .* the model diverged"):
        judged(noisy, [diverging], 1000, seeds=2)


def test_no_blocks_are_left_on_an_ssd(prepared: Path, tmp_path: Path) -> None:
    where = {
        "tables.tier.name": "ssd",
        "tiers.folder": str(tmp_path / "disk"),
        "tables.tier.fraction": 0.5,
    }
    train(
        run_of(
            prepared,
            tmp_path / "run",
            **{"data.batch_size": 64, "loop.max_steps": 4, "model.dim": 4},
            **where,
        )
    )
    before = sorted((tmp_path / "disk").rglob("*"))
    assert before
    judged(
        tmp_path / "run",
        [plan_of(tmp_path / "run", {"user": {"format": {"name": "fp16"}}})],
        200,
        seeds=2,
    )
    assert sorted((tmp_path / "disk").rglob("*")) == before


@pytest.mark.slow  # a dozen trainings of some epochs
@pytest.mark.parametrize("noisy", [(4000, 3)], ids=str, indirect=True)
def test_a_smaller_table_that_is_better_is_proposed_as_a_gain(noisy: Path, tmp_path: Path) -> None:
    """Rows of a table that learnt noise say little of what fewer rows would learn."""
    run = restore(noisy).run
    whole = plan_of(noisy, {}).bytes
    said = propose(noisy, whole // 16, "train", rows=600, trainings=4, progress=quiet)
    assert said.verdict is not None and said.plan.bytes <= whole // 16
    promised = said.verdict.plans[0]
    assert promised.damage < -2 * promised.error

    def ne(tables: Any, seed: int) -> float:
        again = replace(run, run_dir=str(tmp_path / "again"), tables=tables, seed=seed)
        return float(train(again, overwrite=True)["valid"]["ne"])

    tables = said.plan.tables(run.tables)
    rises = [ne(tables, seed) - ne(run.tables, seed) for seed in (101, 102)]
    assert statistics.mean(rises) == pytest.approx(
        promised.damage, abs=2 * math.sqrt(2) * promised.error
    )
