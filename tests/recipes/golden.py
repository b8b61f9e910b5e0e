"""Losses of recipes on small made logs, step by step, which a change of structure must not move.

    python tests/recipes/golden.py                    # of this checkout, beside golden.json
    python tests/recipes/golden.py --beside CHECKOUT  # and of another one, on this machine: bit for bit
    python tests/recipes/golden.py --write            # make golden.json anew
    python tests/recipes/golden.py --json             # print them

A case is a recipe with some settings: the recipes of README, the default blend, and what a run may
switch on (two ranks, rows on an SSD, few bits, ids that come and go). Products and logarithms round
differently on another processor or torch, so golden.json holds to REL there. Recipes in which such
a last bit grows, as it does in Wukong's, are not among these, nor is AUC, in which two rows may
change places.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # as a script

from sparrow.trained.run import Run  # noqa: E402
from sparrow.training import train  # noqa: E402
from tests.recipes import logs  # noqa: E402

GOLDEN = Path(__file__).parent / "golden.json"
KERNELS = ("reference", "cpp")
STEPS, REL = 12, 1e-5
SETTINGS = {
    "data.batch_size": 256,
    "loop.max_steps": STEPS,
    "log.every": 1,
    "log.tensorboard": False,
    "threads": 1,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run. recipe: its name. kernels: with which it runs. ssd: whether it needs a folder for
    rows.
    """

    recipe: str
    settings: dict[str, Any] = field(default_factory=dict)
    kernels: tuple[str, ...] = KERNELS
    ranks: int = 1
    ssd: bool = False


_LAYOUTS = {"sharding.plan": "auto", "sharding.forward.name": "cast", "loop.evaluate_every": 6}
_SSD = {
    "tables.tier.name": "ssd",
    "tables.tier.fraction": 0.6,
    "data.batch_size": 32,
    "loop.max_steps": 40,
}
_DYNAMIC = {"tables.addressing.name": "dynamic", "tables.addressing.rows": 150}
CASES = {
    **{
        name: Case(recipe=name)
        for name in ("demo", "criteo", "globo_history", "globo_gdcn", "movielens_mmoe")
    },
    "blend": Case(recipe="census_blend"),
    "two ranks": Case(recipe="demo", settings=_LAYOUTS, kernels=("cpp",), ranks=2),
    "SSD": Case(recipe="demo", settings=_SSD, ssd=True),
    "few bits": Case(recipe="demo", settings={"precision": "mxfp8", "tables.format.name": "int8"}),
    "dynamic": Case(recipe="demo", settings=_DYNAMIC),
}

Losses = dict[str, list[float]]
"""Recipe and kernels -> the loss of each step, then NE of the valid part, where it has one."""


def losses(
    prepared: Path,
    case: Case,
    kernels: str,
    run_dir: Path,
    on_ranks: Callable[[list[str], int], None] | None = None,
) -> list[float]:
    """Of a run. on_ranks: has so many ranks run a command (under torchrun)."""
    settings = {"data.path": str(prepared), "run_dir": str(run_dir), **SETTINGS, **case.settings}
    if case.ssd:
        # the name of before `tiers.folder`, which the other checkout may not know
        settings["ssd"] = str(run_dir.parent / "ssd")
    recipe = logs.RECIPES / f"{case.recipe}.toml"
    if case.ranks > 1:
        options = [text for name, value in settings.items() for text in (f"--{name}", str(value))]
        (on_ranks or launch)(["train", str(recipe), *options], case.ranks)
    else:
        with pytest.MonkeyPatch.context() as patch:
            if kernels == "reference":
                patch.setattr(
                    "sparrow.kernels.missing", lambda: "the reference is asked for"
                )  # as where none are built
                patch.setattr("sparrow.kernels._say", lambda problem: None)
            train(Run.load(recipe, settings))
    lines = [json.loads(line) for line in (run_dir / "log.jsonl").read_text().splitlines()]
    of_steps = [line["loss"] for line in lines if "loss" in line]
    return of_steps + [line["ne"] for line in lines if "loss" not in line]


def launch(arguments: list[str], ranks: int) -> None:
    """Runs a command of Sparrow on some ranks of this machine."""
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", "-m", "sparrow", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def measured(cases: Iterable[str]) -> Losses:
    """Of some cases, each with its kernels."""
    table = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in cases:
            case = CASES[name]
            prepared = logs.prepared(logs.of_recipe(case.recipe), Path(folder, name))
            for kernels in case.kernels:
                table[f"{name}, {kernels}"] = losses(
                    prepared, case, kernels, Path(folder, name, kernels)
                )
    return table


def furthest(these: Losses, those: Losses) -> float:
    """The largest relative difference; infinite where there is not the same to compare, or a
    NaN.
    """
    if {name: len(row) for name, row in these.items()} != {
        name: len(row) for name, row in those.items()
    }:
        return math.inf
    pairs = ((a, b) for name, row in these.items() for a, b in zip(row, those[name], strict=True))
    found = [abs(a - b) / abs(b) for a, b in pairs]
    return math.inf if any(map(math.isnan, found)) else max(found)  # max alone passes over a NaN


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--beside", type=Path, help="another checkout, with its kernels built")
    asked = parser.parse_args()
    mine = measured(CASES)
    if asked.write:
        GOLDEN.write_text(json.dumps(mine, indent=1) + "\n")
    if asked.json:
        print(json.dumps(mine))
        return
    if asked.beside:
        command = [
            sys.executable,
            "-W",
            "ignore",
            str(asked.beside.resolve() / "tests/recipes/golden.py"),
            "--json",
        ]
        theirs = json.loads(
            subprocess.run(command, capture_output=True, text=True, check=True).stdout
        )
        for name, row in mine.items():
            print(
                f"{name:28}"
                f" {'the same bits' if row == theirs[name] else f'{row} here, {theirs[name]} there'}"
            )
    print(f"furthest from golden.json: {furthest(mine, json.loads(GOLDEN.read_text())):.1e}")


if __name__ == "__main__":
    main()
