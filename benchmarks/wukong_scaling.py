"""Quality against compute on a real log: Wukong, DLRM and DCNv2 grow, each size trained with three seeds.

    python benchmarks/wukong_scaling.py --globo GLOBO_REQUESTS.parquet --runs DIR   # about an hour
    python benchmarks/wukong_scaling.py --quick                                     # a made log, two sizes, one seed

Globo with the settings of `recipes/globo.toml`: every row is predicted before it is trained on, NE of the last fifth.
The sizes are those of `sparrow scale`, six of each family. What is trained is kept in --runs, so that a stopped
benchmark goes on where it was. One thread a run.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import tempfile
from pathlib import Path

from _peers.cells import cells
from wukong_orders import spread, verdict

from sparrow import data
from sparrow.data.schema import Schema
from sparrow.models import ModelConfig, dcnv2, dlrm, wukong
from sparrow.training import Run
from sparrow.training.scaling import Point, draw, law, scale, sizes

RECIPES = Path(__file__).parents[1] / "recipes"
SMALLEST: dict[str, ModelConfig] = {
    "wukong": wukong.Config(layers=1, n_f=4, n_l=4, k=4, mlp=(32,), top=(64,), bottom=(32,), compressed=2),
    "dlrm": dlrm.Config(bottom=(16,), top=(16,)),
    "dcnv2": dcnv2.Config(cross_layers=1, deep=(16,), rank=8),
}


def trained(run: Run) -> dict[str, float]:
    """What one run reached."""
    (found,) = scale([run])
    return {"flops": found.flops, "weights": found.weights, "ne": found.ne, "auc": found.auc}


def main() -> None:
    """All runs, then the table, the laws and the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--globo", type=Path, help="the request log that globo_requests.py makes")
    parser.add_argument("--runs", type=Path, help="where runs are kept; a folder of its own unless told")
    parser.add_argument("--quick", action="store_true", help="a made log, two sizes, one seed")
    parser.add_argument("--picture", type=Path, help="where the families are drawn")
    asked = parser.parse_args()
    count, seeds = (2, 1) if asked.quick else (6, 3)
    with tempfile.TemporaryDirectory() as folder:
        runs = asked.runs or Path(folder)
        log = runs / "log"
        if asked.quick:
            data.generate(runs / "log.parquet", rows=20_000, users=300, items=200)
            data.prepare([runs / "log.parquet"], log)
        elif not log.exists():
            data.prepare([asked.globo], log, schema=Schema.load(RECIPES / "globo.schema.toml"))
        recipe = Run.load(RECIPES / "globo.toml", {"data.path": str(log)})
        jobs = {}
        for name, model in SMALLEST.items():
            first = dataclasses.replace(recipe, run_dir=str(runs / name), model=model, threads=1)
            for run in sizes(first, count, seeds):
                jobs[f"{name}-{Path(run.run_dir).name}"] = (run,)
        show(cells(runs / "cells", trained, jobs), count, seeds, asked.picture)


def show(found: dict[str, dict[str, float]], count: int, seeds: int, picture: Path | None) -> None:
    """Every family's sizes in turn."""
    print(f"{seeds} seeds, mean and standard deviation")
    print(f"{'family':<10}{'MFLOP':>10}{'weights':>11}{'NE':>18}{'AUC':>18}")
    means: dict[str, list[Point]] = {}
    every: dict[str, list[Point]] = {}
    for name in SMALLEST:
        each = [Point(name, {}, measured="", rows=0, **one) for key, one in found.items() if key.startswith(name)]
        every[name], means[name] = each, []
        for size in range(count):
            of = each[size * seeds : (size + 1) * seeds]
            ne, auc = [one.ne for one in of], [one.auc for one in of]
            print(f"{name:<10}{of[0].flops / 1e6:10.4f}{of[0].weights:11,}{spread(ne):>18}{spread(auc):>18}")
            means[name].append(dataclasses.replace(of[0], ne=statistics.mean(ne), auc=statistics.mean(auc)))
        a, b = law(each)
        print(f"{name}: NE = {a:.4g} * FLOP^{b:.5f}")
    if picture is not None and draw(every, picture):
        print(f"{picture.name}: the picture")
    verdict(means)


if __name__ == "__main__":
    main()
