"""Ranks that are about to run different jobs say so, before anything is built."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sparrow import data
from sparrow.apps.generate import generate
from tests.equivalence import cases
from tests.equivalence.pool import Pool

pytestmark = pytest.mark.multi
SETTINGS: dict[str, Any] = {
    "data.batch_size": 500,
    "model.dim": 4,
    "loop.max_steps": 2,
    "sharding.plan": "row_wise",
}


def says(
    ranks: Callable[[int], Pool], size: int, prepared: Path, place: Path, **of_rank_1: Any
) -> str:
    """What all ranks say when one has other settings."""
    settings: list[dict[str, Any]] = [SETTINGS] * size
    settings[1] = {
        **SETTINGS,
        **{name.replace("__", "."): value for name, value in of_rank_1.items()},
    }
    first, *others = ranks(size).run(cases.refused, str(prepared), str(place / "run"), settings)
    assert set(others) == {first}
    return str(first)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"seed": 1}, "seed: 1 on rank 1, 0 on the others"),
        (
            {"tables__rule__lr": 0.5, "dense__lr": 0.5},
            r"tables\.rule\.lr: 0.5 on rank 1, .* the others; dense\.lr: 0.5 on rank 1, ",
        ),
        ({"loop__clip_norm": 0.1}, r"loop\.clip_norm: 0.1 on rank 1, unset on the others"),
        ({"loop__max_steps": 3}, r"loop\.max_steps: 3 on rank 1, 2 on the others"),
        ({"model__name": "fm"}, r'model\.name: "fm" on rank 1, "dcnv2" on the others'),
        ({"sources": "abc"}, 'sources of Sparrow: "abc" on rank 1, ".*" on the others'),
        (
            {"checkpoint__every": 1, "log__every": 3},
            r"checkpoint\.every: 1 on rank 1, .*; log\.every: 3 on rank 1, ",
        ),
    ],
    ids=str,
)
def test_a_rank_that_runs_another_job_is_named(
    ranks: Callable[[int], Pool], prepared: Path, tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    found = says(ranks, 3, prepared, tmp_path, **changes)
    assert re.match(f"the ranks do not run the same job: {told}", found), found
    assert not (tmp_path / "run").exists()


def test_a_rank_that_reads_another_log_is_named(
    ranks: Callable[[int], Pool], prepared: Path, tmp_path: Path
) -> None:
    generate(
        tmp_path / "log.parquet", rows=6000, users=60, items=40, categorical=3, numeric=3, seed=6
    )
    data.prepare([tmp_path / "log.parquet"], tmp_path / "other")
    found = says(ranks, 3, prepared, tmp_path, log=str(tmp_path / "other"))
    assert 'prepared log: "' in found and '" on rank 1, "' in found


def test_a_rank_with_another_plan_is_named(
    ranks: Callable[[int], Pool], prepared: Path, tmp_path: Path
) -> None:
    """Whose file has the same name, say."""
    table, plan = next(iter(data.open(prepared).schema.encodings)), tmp_path / "plan.toml"
    plan.write_text(f'default = "row_wise"\n[layouts.{table}]\nranks = [0]\n')
    found = says(ranks, 3, prepared, tmp_path, sharding__plan=str(plan))
    assert f"plan.{table}.ranks: [0] on rank 1, [0, 1, 2] on the others" in found


def test_names_and_threads_may_differ(
    ranks: Callable[[int], Pool], prepared: Path, tmp_path: Path
) -> None:
    """Hosts mount the same folders at other places. And all end with the same weights, clipped by
    the same norm.
    """
    (tmp_path / "there").symlink_to(tmp_path)
    (tmp_path / "log").symlink_to(prepared)
    place = str(tmp_path / "there" / "run")
    assert (
        says(ranks, 3, prepared, tmp_path, log=str(tmp_path / "log"), run_dir=place, threads=2)
        == ""
    )


def test_hosts_of_other_sizes(ranks: Callable[[int], Pool]) -> None:
    assert set(ranks(2).run(cases.begun_with, [2, 1])) == {
        "hosts of 1 and 2 ranks; start as many on every host"
    }
