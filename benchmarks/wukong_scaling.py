"""Quality against compute on a real log: Wukong, DLRM and DCNv2 grow, each size trained with three
seeds.

    python benchmarks/wukong_scaling.py --globo GLOBO_REQUESTS.parquet --runs DIR   # about an hour
    python benchmarks/wukong_scaling.py --quick                                     # a made log, two sizes, one seed

Globo with the settings of `recipes/globo.toml`: every row is predicted before it is trained on, NE
of the last fifth. The sizes are those of `sparrow scale`, six of each family. What is trained is
kept in --runs, so that a stopped benchmark goes on where it was. One thread a run.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from _peers.cells import cells
from _peers.stats import paired, spread
from _peers.streams import RECIPES, stream
from _peers.targets import print_target

from sparrow.apps.scaling import Point, draw, law, scale, sizes
from sparrow.models import ModelConfig, dcnv2, dlrm, wukong
from sparrow.trained.run import Run

SMALLEST: dict[str, ModelConfig] = {
    "wukong": wukong.Config(
        layers=1, n_f=4, n_l=4, k=4, mlp=(32,), top=(64,), bottom=(32,), compressed=2
    ),
    "dlrm": dlrm.Config(bottom=(16,), top=(16,)),
    "dcnv2": dcnv2.Config(cross_layers=1, deep=(16,), rank=8),
}


def trained(run: Run) -> dict[str, float]:
    """What one run reached."""
    (found,) = scale([run])
    return {"flops": found.flops, "weights": found.weights, "ne": found.ne, "auc": found.auc}


def main() -> None:
    """All runs, then the table, the laws and the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--globo", type=Path, help="the request log that globo_requests.py makes")
    parser.add_argument(
        "--runs", type=Path, help="where runs are kept; a folder of its own unless told"
    )
    parser.add_argument("--quick", action="store_true", help="a made log, two sizes, one seed")
    parser.add_argument("--picture", type=Path, help="where the families are drawn")
    asked = parser.parse_args()
    count, seeds = (2, 1) if asked.quick else (6, 3)
    with tempfile.TemporaryDirectory() as folder:
        runs = asked.runs if asked.runs and not asked.quick else Path(folder)
        log = stream(runs, None if asked.quick else asked.globo)
        recipe = Run.load(RECIPES / "globo.toml", {"data.path": str(log)})
        jobs = {}
        for name, model in SMALLEST.items():
            first = dataclasses.replace(recipe, run_dir=str(runs / name), model=model, threads=1)
            for run in sizes(first, count, seeds):
                jobs[f"{name}-{Path(run.run_dir).name}"] = (run,)
        show(cells(runs / "cells", trained, jobs), count, seeds, asked.picture)


def show(found: dict[str, dict[str, float]], count: int, seeds: int, picture: Path | None) -> None:
    """Every family's sizes in turn, its law, and all of them at equal FLOP."""
    print(f"{seeds} seeds, mean and standard deviation")
    print(f"{'family':<10}{'MFLOP':>10}{'weights':>11}{'NE':>18}{'AUC':>18}")
    every: dict[str, list[Point]] = {}
    for name in SMALLEST:
        each = [
            Point(family=name, measured="", **one)
            for key, one in found.items()
            if key.startswith(name)
        ]
        every[name] = each
        for size in range(count):
            of = each[size * seeds : (size + 1) * seeds]
            ne, auc = spread([one.ne for one in of]), spread([one.auc for one in of])
            print(f"{name:<10}{of[0].flops / 1e6:10.4f}{of[0].weights:11,}{ne:>18}{auc:>18}")
        fitted = law(each)
        print(f"{name}: NE = {fitted}, exponent +- {fitted.margin:.4f} (95 %)")
    if picture is not None and draw(every, picture):
        print(f"{picture.name}: the picture")
    # between these all have sizes
    least = max(min(p.flops for p in each) for each in every.values())
    most = min(max(p.flops for p in each) for each in every.values())
    met = most / least >= 30
    print_target("span of compute that all have", f"{most / least:.0f} times", "30", met)
    for flops in np.geomspace(least, most, 4) if most > least else ():
        every_ne = {
            name: [at(each[seed::seeds], flops) for seed in range(seeds)]
            for name, each in every.items()
        }
        others = [
            min(pair)
            for pair in zip(*(every_ne[name] for name in every_ne if name != "wukong"), strict=True)
        ]
        gain, error = paired(others, every_ne["wukong"])
        met = gain > 2 * error
        text = ", ".join(
            f"{name} {statistics.mean(values):.4f}" for name, values in every_ne.items()
        )
        goal = f"wukong below the best other by 2 errors, {2 * error:.4f}"
        print_target(f"NE at {flops / 1e6:.2f} MFLOP", f"{text}; lower by {gain:.4f}", goal, met)


def at(sizes: Sequence[Point], flops: float) -> float:
    """A family's NE between two of its sizes, of one seed."""
    return float(np.interp(np.log(flops), np.log([p.flops for p in sizes]), [p.ne for p in sizes]))


if __name__ == "__main__":
    main()
