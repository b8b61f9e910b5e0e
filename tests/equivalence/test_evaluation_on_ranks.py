"""What ranks judge is the model alone: its checkpoint in one process has the same scores, by
whatever codec it learnt.

To 1e-6: shares of a batch are products of other shapes, and tables that are cut by rows add up
vectors of a bag in another order. Both are roundings of fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
from torch import Tensor

from sparrow import data
from sparrow.core.config import Family
from sparrow.distributed import World
from sparrow.metrics import evaluate
from sparrow.trained.scorer import restore
from sparrow.training.feed import read_share
from sparrow.training.loop import Trainer
from tests.equivalence.pool import Pool
from tests.runs import run_of

pytestmark = pytest.mark.multi
FAMILY = Family("sparrow.distributed.codecs")
SETTINGS: dict[str, Any] = {
    "data.batch_size": 500,
    "model.dim": 8,
    "model.deep": [16],
    "loop.max_steps": 4,
    "sharding.dense": "bf16",
}


def every_codec() -> list[dict[str, str]]:
    """The members of the family, each with all that its settings may be."""
    found = []
    for name in FAMILY.names():
        choices = {
            field: get_args(kind) for field, kind in get_type_hints(FAMILY.config(name)).items()
        }
        assert len(choices) == 1 and all(choices.values()), name
        found += [
            {"name": name, field: value} for field, values in choices.items() for value in values
        ]
    return found


def codec_settings(codec: dict[str, str]) -> dict[str, str]:
    """A codec of both ways, as settings of a run."""
    return {
        f"sharding.{way}.{key}": value
        for way in ("forward", "backward")
        for key, value in codec.items()
    }


def judge(
    world: World, prepared: str, place: str, jobs: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """Job -> its results, and the scores of this rank's rows of each batch of the valid part."""
    judged = {}
    for name, changes in jobs.items():
        trainer = Trainer(run_of(prepared, f"{place}/{name}", **changes))
        results = trainer.fit()
        trainer.job.model.eval()
        with torch.no_grad():
            loader = read_share(trainer.job.run, trainer.job.dataset, world, "valid")
            scores = [trainer.evaluator.score(batch) for batch in loader]
        trainer.job.ranks.world.leave()
        judged[name] = results, scores
    return judged


def assert_judged_as_its_checkpoint(
    run_dir: Path, prepared: Path, ranks: list[tuple[dict[str, Any], list[Tensor]]]
) -> None:
    alone = restore(run_dir, which="last")
    loader = data.open(prepared).loader(alone.run.data.batch_size, "valid")
    valid = evaluate(alone.scores, loader)
    for results, _ in ranks:
        for name in ("ne", "logloss", "calibration"):
            assert results["valid"][name] == pytest.approx(valid[name], rel=1e-6)
    with torch.no_grad():
        for batch, *shares in zip(loader, *(scores for _, scores in ranks), strict=True):
            torch.testing.assert_close(torch.cat(shares), alone.scores(batch), rtol=1e-6, atol=1e-6)


def judge_and_compare(
    pool: Pool, prepared: Path, place: Path, jobs: dict[str, dict[str, Any]]
) -> None:
    """Run all jobs in one launch, and hold each beside its checkpoint."""
    judged = pool.run(judge, str(prepared), str(place), jobs)
    for name in jobs:
        assert_judged_as_its_checkpoint(
            place / name, prepared, [of_rank[name] for of_rank in judged]
        )


@pytest.mark.parametrize(
    ("size", "whole"),
    [
        (2, False),
        (3, False),
        pytest.param(2, True, marks=pytest.mark.slow),
        pytest.param(3, True, marks=pytest.mark.slow),
    ],
)
def test_codecs(
    ranks: Callable[[int], Pool], prepared: Path, tmp_path: Path, size: int, whole: bool
) -> None:
    """With dense gradients in bf16 too. whole: all settings of each codec, not one."""
    codecs = every_codec()
    if not whole:
        codecs = list({codec["name"]: codec for codec in codecs}.values())
    jobs = {}
    for codec in codecs:
        jobs["-".join(codec.values())] = {
            **SETTINGS,
            **codec_settings(codec),
            "sharding.plan": "row_wise",
        }
    judge_and_compare(ranks(size), prepared, tmp_path, jobs)


CRUDE = codec_settings({"name": "mx", "format": "mxfp4"})


@pytest.mark.parametrize(
    "plan",
    [
        "table_row_wise",
        pytest.param("table_wise", marks=pytest.mark.slow),
        pytest.param("column_wise", marks=pytest.mark.slow),
    ],
)
def test_ways_of_a_vector(
    ranks: Callable[[int], Pool], prepared: Path, tmp_path: Path, plan: str
) -> None:
    """Sums within a host, whole tables, and parts of vectors, on two hosts of two ranks."""
    judge_and_compare(
        ranks(4), prepared, tmp_path, {plan: {**SETTINGS, **CRUDE, "sharding.plan": plan}}
    )


def test_the_weights_of_a_blends_parts(
    ranks: Callable[[int], Pool], prepared: Path, tmp_path: Path
) -> None:
    """They are chosen by the valid part too. Other parts would leave the members, which ranks
    exchange, little.
    """
    settings = {
        "model.name": "blend",
        "model.trees": 0,
        "model.logistic": False,
        "tables.rule.lr": 0.3,
    }
    settings |= {"data.batch_size": 500, "loop.max_steps": 8, "sharding.plan": "row_wise", **CRUDE}
    judge_and_compare(ranks(2), prepared, tmp_path, {"blend": settings})
    model = restore(tmp_path / "blend", which="last").model.eval()
    held_PT = model.model.weights_PT.clone()
    parts = model.weigh_parts(data.open(prepared).loader(500, "valid"))
    torch.testing.assert_close(model.model.weights_PT, held_PT, rtol=1e-5, atol=1e-6)
    assert 0.1 < parts["members"]["weight"] < 0.99
