"""Losses that a change of structure must not move; `golden.py` compares two checkouts bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sparrow import kernels
from sparrow.trained.run import Run
from sparrow.training import train
from tests.recipes import golden, logs

RECIPES = sorted(p.stem for p in logs.RECIPES.glob("*.toml") if not p.name.endswith(".schema.toml"))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory):
    """Recipe -> the log that it reads, each log made once."""
    found: dict[str, Path] = {}

    def of(recipe: str) -> Path:
        log = logs.of_recipe(recipe)
        found[log] = found.get(log) or logs.prepared(log, tmp_path_factory.mktemp(log))
        return found[log]

    return of


@pytest.mark.parametrize("kernel", golden.KERNELS)
@pytest.mark.parametrize("recipe", golden.RECIPES)
def test_losses_have_not_moved(prepared, recipe: str, kernel: str, tmp_path: Path) -> None:
    if kernel == "cpp" and (problem := kernels.missing()):
        pytest.skip(problem)
    name = f"{recipe}, {kernel}"
    found = golden.losses(prepared(recipe), recipe, kernel, tmp_path / "run")
    assert golden.furthest({name: found}, {name: json.loads(golden.GOLDEN.read_text())[name]}) < golden.REL


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_takes_a_step(prepared, recipe: str, tmp_path: Path) -> None:
    """As it is, but for its log and its length."""
    given = {"data.path": str(prepared(recipe)), "run_dir": str(tmp_path / "run"), "loop.max_steps": 1}
    assert train(Run.load(logs.RECIPES / f"{recipe}.toml", given))["step"] == 1
