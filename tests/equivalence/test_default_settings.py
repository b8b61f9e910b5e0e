"""Every model as it is without a setting: what is on by default is on. Only the log is small, and
steps are few.

Members of the family are found by themselves. Those that draw by default run in `make test`, all
others as `slow`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sparrow.cli import train
from sparrow.core import UserError
from sparrow.core.config import Family
from sparrow.distributed import World
from sparrow.embeddings import TableChoices
from sparrow.layers.dropout import drops
from sparrow.trained.build import tables_of
from sparrow.trained.run import Run
from sparrow.trained.scorer import restore
from sparrow.training.feed import read_share
from sparrow.training.loop import Trainer
from tests.data.grouped import SCHEMA, prepared_sessions
from tests.equivalence import cases
from tests.equivalence.pool import Pool
from tests.runs import run_of

FAMILY = Family("sparrow.models")
NAMES = FAMILY.names()
DRAWS = [name for name in NAMES if drops(FAMILY.config(name)().build(SCHEMA, TableChoices()))]
EACH = [pytest.param(name, marks=() if name in DRAWS else pytest.mark.slow) for name in NAMES]
# 50 rows are no whole share of 3 ranks
STEPS: dict[str, Any] = {"data.batch_size": 50, "loop.max_steps": 4}
PLAIN = {
    "tables.rule.name": "sgd",
    "tables.rule.lr": 1.0,
    "dense.name": "sgd",
    "dense.lr": 0.1,
}  # Adam makes steps of rounding


@pytest.fixture(scope="module")
def sessions(tmp_path_factory: pytest.TempPathFactory) -> str:
    return prepared_sessions(tmp_path_factory.mktemp("sessions"))


def test_a_blend_draws_by_default() -> None:
    """Else the quick cases below would show nothing."""
    assert "blend" in DRAWS


# -- draws -----------------------------------------------------------------------------------------


def global_states() -> list[Any]:
    """Those of the generators that all code of a process shares."""
    return [torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()]


def train_with(prepared: str, place: Path, seed: int, changes: dict[str, Any]) -> list[Tensor]:
    """All weights and rows after a training, before which the global generators were given a seed
    of their own.
    """
    random.seed(seed)
    np.random.seed(seed)
    trainer = Trainer(run_of(prepared, place, **{**STEPS, **changes}))
    torch.manual_seed(seed)  # now: first weights are drawn from it, by the seed of the run
    before = global_states()
    trainer.fit()
    assert global_states() == before
    rows = [
        field
        for tables in trainer.job.tables
        for record in tables.all_records()
        for field in record.fields.values()
    ]
    return [*trainer.job.model.state_dict().values(), *rows]


def assert_no_global_draw(prepared: str, place: Path, changes: dict[str, Any]) -> None:
    one, other = (train_with(prepared, place / str(seed), seed, changes) for seed in (1, 2))
    assert len(one) > 2 and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_training_neither_reads_nor_moves_a_global_generator(
    sessions: str, tmp_path: Path, name: str
) -> None:
    """Ranks and runs that were resumed have others. What is drawn depends on the seed, the row and
    the step.
    """
    assert_no_global_draw(sessions, tmp_path, {"model.name": name})


DRAWN = {
    "weights": {"precision.weights": "bf16-stochastic", "dense.name": "sgd"},
    "rows": {"tables.format.name": "int8"},
    "order": {"data.shuffle": True, "data.batch_size": 3000, "loop.epochs": 3},
    "ids": {"data.id_dropout": {"item": 0.3, "history": 0.5}},
    "pairs": {"loss.name": "pairwise"},
    "calibrated": {"calibration.method": "isotonic"},
}


@pytest.mark.parametrize("name", DRAWN)
def test_whatever_else_is_drawn(prepared: Path, tmp_path: Path, name: str) -> None:
    assert_no_global_draw(str(prepared), tmp_path, {"model.name": "dcnv2", **DRAWN[name]})


DROPPING = [name for name in NAMES if hasattr(FAMILY.config(name)(), "dropout")]


@pytest.mark.slow
@pytest.mark.parametrize("name", DROPPING)
def test_dropout_of_every_model(sessions: str, tmp_path: Path, name: str) -> None:
    assert_no_global_draw(sessions, tmp_path, {"model.name": name, "model.dropout": 0.3})


# -- ranks -----------------------------------------------------------------------------------------


def learn_and_judge(
    world: World, prepared: str, place: str, changes: dict[str, Any]
) -> dict[str, Any]:
    """A job's dense weights, and the scores of this rank's rows of each batch of the valid part."""
    trainer = Trainer(run_of(prepared, place, **changes))
    trainer.fit()
    trainer.job.model.eval()
    with torch.no_grad():
        loader = read_share(trainer.job.run, trainer.job.dataset, world, "valid")
        scores = [trainer.evaluator.score(batch) for batch in loader]
    trainer.job.ranks.world.leave()
    return {
        "dense": {name: value.clone() for name, value in trainer.job.model.state_dict().items()},
        "scores": scores,
    }


def learn_with_a_stop(
    world: World, prepared: str, place: str, changes: dict[str, Any]
) -> dict[str, Any]:
    """As `learn_and_judge`, and two jobs more of the same settings, one of them with a stop
    half-way.
    """
    judged = learn_and_judge(world, prepared, f"{place}/run", {**changes, **PLAIN})
    cases.rest(world, prepared, f"{place}/whole", changes, False)
    cases.fit(world, prepared, f"{place}/cut", changes, True)
    return judged


def assert_near(
    ranks: list[dict[str, Any]], alone: dict[str, Any], places: tuple[Path, Path]
) -> None:
    """Scores to 1e-6, weights and rows to 1e-5 of the largest of their matrix.

    Gradients of shares of a batch are added up in another order, and products of other shapes sum
    in another one.
    """
    for batch, *shares in zip(alone["scores"], *(one["scores"] for one in ranks), strict=True):
        torch.testing.assert_close(torch.cat(shares), batch, rtol=1e-6, atol=1e-6)
    for name, value in alone["dense"].items():
        largest = float(value.abs().max()) if value.numel() else 0.0
        for one in ranks:
            torch.testing.assert_close(one["dense"][name], value, rtol=1e-5, atol=1e-5 * largest)
            assert torch.equal(one["dense"][name], ranks[0]["dense"][name])
    tables = [
        [r.weight for t in tables_of(restore(place).model) for r in t.all_records()]
        for place in places
    ]
    for one, other in zip(*tables, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5 * float(other.abs().max()))


def assert_same_files(one: Path, other: Path) -> None:
    """The last checkpoints have the same bits, the states of all generators too."""
    last = max((one / "checkpoints").glob("step-*"))
    files = sorted(file.name for file in last.glob("*.safetensors"))
    assert len(files) >= 4
    for file in files:
        assert (last / file).read_bytes() == (
            other / "checkpoints" / last.name / file
        ).read_bytes(), file


@pytest.mark.multi
@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("name", EACH)
def test_ranks_train_what_one_process_does_and_go_on_to_the_bit(
    ranks: Callable[[int], Pool], sessions: str, tmp_path: Path, name: str, size: int
) -> None:
    """In one launch. Whether shares are equal or not: requests are never cut, and 50 rows are no
    multiple of 3.
    """
    changes = {**STEPS, "model.name": name}
    judged = ranks(size).run(learn_with_a_stop, sessions, str(tmp_path), changes)
    before = torch.get_num_threads()
    alone = learn_and_judge(World(), sessions, str(tmp_path / "alone"), {**changes, **PLAIN})
    torch.set_num_threads(before)
    assert_near(judged, alone, (tmp_path / "run", tmp_path / "alone"))
    assert_same_files(tmp_path / "whole", tmp_path / "cut")
    assert size == 2 or len({len(rank["scores"][0]) for rank in judged}) > 1


# -- compile ---------------------------------------------------------------------------------------


def test_a_default_that_draws_is_not_compiled(prepared: Path, tmp_path: Path) -> None:
    """On a small log that is a blend, and nobody gave a dropout."""
    command = [
        str(prepared),
        "--run_dir",
        str(tmp_path / "run"),
        "--compile",
        "true",
        "--loop.max_steps",
        "2",
    ]
    with pytest.raises(
        UserError,
        match="compile: not with dropout yet; leave compile out, or set model.dropout to 0",
    ):
        train.main(command)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's own, of torch
@pytest.mark.parametrize(
    "remedy", [["--compile", "true", "--model.dropout", "0"], []], ids=["no dropout", "eager"]
)
def test_both_remedies_work(prepared: Path, tmp_path: Path, remedy: list[str]) -> None:
    train.main(
        [str(prepared), "--run_dir", str(tmp_path / "run"), "--loop.max_steps", "2", *remedy]
    )
    settings = Run.load(tmp_path / "run" / "run.toml")
    assert FAMILY.name_of(settings.model) == "blend" and settings.compile == bool(remedy)
