"""Losses of recipes on small made logs, step by step, which a change of structure must not move.

    python tests/recipes/golden.py                    # of this checkout, beside golden.json
    python tests/recipes/golden.py --beside CHECKOUT  # and of another one, on this machine: bit for bit
    python tests/recipes/golden.py --write            # make golden.json anew
    python tests/recipes/golden.py --json             # print them

Products and logarithms round differently on another processor or torch, so golden.json holds to REL there. Recipes in
which such a last bit grows, as it does in Wukong's, are not among these, nor is AUC, in which two rows may change
places.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # as a script

from sparrow.trained.run import Run  # noqa: E402
from sparrow.training import train  # noqa: E402
from tests.recipes import logs  # noqa: E402

GOLDEN = Path(__file__).parent / "golden.json"
RECIPES = ("demo", "criteo", "globo_history", "globo_gdcn", "movielens_mmoe")  # recipe names
KERNELS = ("reference", "cpp")
STEPS, REL = 12, 1e-5
SETTINGS = {"data.batch_size": 256, "loop.max_steps": STEPS, "log.every": 1, "log.tensorboard": False, "threads": 1}

Losses = dict[str, list[float]]
"""Recipe and kernels -> the loss of each step, then NE of the valid part, where it has one."""


def losses(prepared: Path, recipe: str, kernels: str, run_dir: Path) -> list[float]:
    """Of a run of a recipe."""
    settings = {"data.path": str(prepared), "run_dir": str(run_dir), **SETTINGS}
    with pytest.MonkeyPatch.context() as patch:
        if kernels == "reference":
            patch.setattr("sparrow.kernels.missing", lambda: "the reference is asked for")  # as where none are built
            patch.setattr("sparrow.kernels._say", lambda problem: None)
        train(Run.load(logs.RECIPES / f"{recipe}.toml", settings))
    lines = [json.loads(line) for line in (run_dir / "log.jsonl").read_text().splitlines()]
    found = [line["loss"] for line in lines if "loss" in line]
    return found + [line["ne"] for line in lines if "loss" not in line]


def measured(recipes: Iterable[str]) -> Losses:
    """Of all kernels, of some recipes."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for recipe in recipes:
            prepared = logs.prepared(logs.of_recipe(recipe), Path(folder, recipe))
            for kernels in KERNELS:
                found[f"{recipe}, {kernels}"] = losses(prepared, recipe, kernels, Path(folder, recipe, kernels))
    return found


def furthest(these: Losses, those: Losses) -> float:
    """The largest relative difference; infinite where there is not the same to compare, or a NaN."""
    if {name: len(row) for name, row in these.items()} != {name: len(row) for name, row in those.items()}:
        return math.inf
    pairs = ((a, b) for name, row in these.items() for a, b in zip(row, those[name], strict=True))
    found = [abs(a - b) / abs(b) for a, b in pairs]
    return math.inf if any(map(math.isnan, found)) else max(found)  # max alone passes over a NaN


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--beside", type=Path, help="another checkout, with its kernels built")
    asked = parser.parse_args()
    mine = measured(RECIPES)
    if asked.write:
        GOLDEN.write_text(json.dumps(mine, indent=1) + "\n")
    if asked.json:
        print(json.dumps(mine))
        return
    if asked.beside:
        command = [sys.executable, "-W", "ignore", str(asked.beside.resolve() / "tests/recipes/golden.py"), "--json"]
        theirs = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        for name, row in mine.items():
            print(f"{name:28} {'the same bits' if row == theirs[name] else f'{row} here, {theirs[name]} there'}")
    print(f"furthest from golden.json: {furthest(mine, json.loads(GOLDEN.read_text())):.1e}")


if __name__ == "__main__":
    main()
