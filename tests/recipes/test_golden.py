"""Losses that a change of structure must not move; `golden.py` compares two checkouts bit for
bit.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sparrow import kernels
from sparrow.trained.run import Run
from sparrow.training import train
from tests.equivalence import cases
from tests.equivalence.pool import Pool
from tests.recipes import golden, logs

RECIPES = sorted(p.stem for p in logs.RECIPES.glob("*.toml") if not p.name.endswith(".schema.toml"))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory):
    """Recipe -> the log that it reads, each log made once."""
    found: dict[str, Path] = {}

    def of(recipe: str) -> Path:
        log = logs.of_recipe(recipe)
        # 4,000 rows take ten seconds of the large model that is for it
        rows = 400 if log == "criteo_tb" else 4000
        found[log] = found.get(log) or logs.prepared(log, tmp_path_factory.mktemp(log), rows)
        return found[log]

    return of


def on_ranks(arguments: list[str], ranks: int) -> None:
    """Without torchrun, which takes seconds."""
    pool = Pool(ranks, ranks)
    assert pool.run(cases.commanded, [arguments[1:]] * ranks) == [""] * ranks
    pool.close()


@pytest.mark.parametrize(
    ("name", "kernel"),
    [  # a blend has no kernel of its own, and takes long without any
        pytest.param(
            name, of, marks=pytest.mark.slow if (name, of) == ("blend", "reference") else ()
        )
        for name, case in golden.CASES.items()
        for of in case.kernels
    ],
)
def test_losses_have_not_moved(prepared, name: str, kernel: str, tmp_path: Path) -> None:
    if kernel == "cpp" and (problem := kernels.missing()):
        pytest.skip(problem)
    case = golden.CASES[name]
    if case.recipe == "census_blend":
        pytest.importorskip("lightgbm", reason="needs the extra [trees]")
    found = golden.losses(prepared(case.recipe), case, kernel, tmp_path / "run", on_ranks)
    name = f"{name}, {kernel}"
    assert (
        golden.furthest({name: found}, {name: json.loads(golden.GOLDEN.read_text())[name]})
        < golden.REL
    )


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_takes_a_step(prepared, recipe: str, tmp_path: Path) -> None:
    """As it is, but for its log and its length."""
    given = {
        "data.path": str(prepared(recipe)),
        "run_dir": str(tmp_path / "run"),
        "loop.max_steps": 1,
    }
    assert train(Run.load(logs.RECIPES / f"{recipe}.toml", given))["step"] == 1
