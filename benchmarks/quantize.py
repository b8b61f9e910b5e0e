"""What fewer bits cost in quality, for served models: uniform formats beside what `sparrow quantize` finds.

    python benchmarks/quantize.py --globo REQUESTS.parquet --work WORK   # an hour, one core; resumable
    python benchmarks/quantize.py --quick                                # a small generated log, one seed, a minute

Two logs: Globo's requests of one session in five, and a generated one of a million rows. DLRM, DCNv2 and Wukong with
vectors of 16 numbers, and DLRM with 64, are trained with the defaults of `sparrow train`, three seeds each, and
exported. Then formats are changed, and NE of the *test* part is compared, row by row, with that of fp32. `quantize`
sees the training and valid parts alone. Models are kept in WORK, so that a stopped run goes on where it was.

"int4" are rows between their least and largest number, "int4 greedy" those of a range search. "searched" is
`quantize` with a budget of 0.02 % of NE; what it promised is printed beside what came.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from _peers.cells import kept
from row_formats import processor

from sparrow import data
from sparrow.analysis.bits.calibrate import calibrated
from sparrow.analysis.bits.quantize import last, quantize
from sparrow.analysis.bits.search import rises
from sparrow.analysis.bits.variants import TABLES, Variants
from sparrow.analysis.judge import Judge
from sparrow.features.schema import Schema
from sparrow.kernels.formats import int4
from sparrow.models import dcnv2, dlrm, wukong
from sparrow.serving import load
from sparrow.serving.export import export
from sparrow.trained.run import Data, Log, Run
from sparrow.training import train

RECIPES = Path(__file__).parents[1] / "recipes"
BUDGET = 2e-4
MIN_MAX = {**TABLES, "int4": int4.Config(rounding="nearest")}
MODELS: dict[str, Callable[[int], Any]] = {
    "dlrm": lambda dim: dlrm.Config(dim=dim),
    "dcnv2": lambda dim: dcnv2.Config(dim=dim),
    "wukong": lambda dim: wukong.Config(dim=dim),
}
UNIFORM = {  # formats of tables and products
    "bf16": ("fp32", "bf16"),
    "int8 rows": ("int8", "fp32"),
    "int4 rows": ("int4", "fp32"),
    "int4 greedy rows": ("int4", "fp32"),
    "int8": ("int8", "int8"),
    "int4, int8": ("int4", "int8"),
}
ROWS = ("int4 rows", "int4 greedy rows")  # alone with vectors of 64 numbers


def trained(work: Path, log: Path, name: str, dim: int, seed: int) -> Path:
    """A model folder, made when it is not there."""
    place = work / f"{log.stem}-{name}-{dim}-{seed}"
    out = place / "model"
    if not out.exists():
        run = Run(
            run_dir=str(place / "run"), data=Data(path=str(work / log.stem)), model=MODELS[name](dim), threads=1,
            seed=seed, log=Log(tensorboard=False),
        )  # fmt: skip
        train(run, overwrite=True)
        export(place / "run", out, [log])
    return out


def cell(model: Path, prepared: Path, name: str, rows: int) -> dict[str, Any]:
    """What one change of formats does: rise of NE in the test part as a share of it, its error, and bytes."""
    torch.set_num_threads(1)
    dataset = data.open(prepared)
    test = next(iter(dataset.loader(dataset.rows("test"), split="test", dedup="off")))
    judge = Judge(test, prepared)
    scorer = load(model)
    before = judge.ne_of(lambda batch, row: scorer.scores(batch), 1024)
    with tempfile.TemporaryDirectory() as folder:
        if name == "searched":
            done = quantize(model, Path(folder) / "out", prepared, budget=BUDGET, rows=rows)
            after = judge.ne_of(lambda batch, row: done.scorer.scores(batch), 1024)
            best = done.found.best
            found = {"promised": best.rise.upper, "bytes": done.bytes_of(best.choice), "whole": done.bytes_of({})}
        else:
            tables, layers = UNIFORM[name]
            seen = calibrated(scorer.model, scorer.scores, last(dataset, rows))
            variants = Variants(scorer, seen, Path(folder), MIN_MAX if name == "int4 rows" else TABLES)
            choice = {part: part.steps[0] for part in variants.parts(tables, layers)}
            score = variants.score(choice)
            after = judge.ne_of(lambda batch, row: score(batch), 1024)
            every = variants.parts("int4", "int8")
            of = {(part.kind, part.name): step for part, step in choice.items()}
            found = {
                "bytes": sum(variants.bytes_of(part, of.get((part.kind, part.name), "fp32")) for part in every),
                "whole": sum(variants.bytes_of(part, "fp32") for part in every),
            }
    rise = rises(before, after)
    return {"ne": before[0].value, "value": rise.value, "error": rise.error, "upper": rise.upper, **found}


def table(title: str, found: dict[str, list[dict[str, Any]]]) -> None:
    """Print means over seeds, of the rise of NE in percent of it."""
    print(f"\n{title}; NE {statistics.mean(one['ne'] for one in next(iter(found.values()))):.4f}")
    print(f"{'formats':18} {'rise, %':>10} {'seeds':>9} {'rows':>9} {'bytes':>12} {'times fewer':>12}")
    for name, cells in found.items():
        values = [100 * one["value"] for one in cells]
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        error = 100 * math.sqrt(statistics.mean(one["error"] ** 2 for one in cells))
        size, whole = (statistics.mean(one[of] for one in cells) for of in ("bytes", "whole"))
        print(
            f"{name:18} {statistics.mean(values):+10.4f} {spread:9.4f} {error:9.4f} {size:12,.0f} {whole / size:12.1f}"
            + ("" if name != "searched" else f"   promised {100 * max(one['promised'] for one in cells):+.4f} at most")
        )


def logs(arguments: argparse.Namespace, work: Path) -> list[Path]:
    """The raw logs; they are prepared."""
    made = work / "generated.parquet"
    if not made.exists():
        data.generate(made, rows=20_000 if arguments.quick else 1_000_000, seed=1)
    found, schemas = [made], {made: None}
    if arguments.globo is not None:
        place = work / "globo.parquet"
        if not place.exists():
            place.symlink_to(arguments.globo.resolve())
        found.append(place)
        schemas[place] = Schema.load(RECIPES / "globo.schema.toml")
    for log in found:
        if not (work / log.stem).exists():
            data.prepare([log], work / log.stem, schema=schemas[log])
    return found


def main() -> None:
    """Train what is not there, measure, and say which goals are met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--globo", type=Path, help="requests of one session in five")
    parser.add_argument("--work", type=Path, help="where models and results are kept; a folder of its own unless told")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=50_000, help="by which `quantize` chooses")
    parser.add_argument("--train", action="store_true", help="train what is not there, and measure nothing")
    parser.add_argument("--quick", action="store_true", help="a small generated log, one seed")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as own:
        run(arguments, arguments.work or Path(own))


def run(arguments: argparse.Namespace, work: Path) -> None:
    """See `main`."""
    work.mkdir(exist_ok=True, parents=True)
    torch.set_num_threads(1)
    seeds: Sequence[int] = range(1 if arguments.quick else arguments.seeds)
    print(f"{processor()}; torch {torch.__version__}; {len(seeds)} seeds; rises of NE in the test part, in % of it")
    verdicts = []
    for log in logs(arguments, work):
        kept_to = []
        for name, dim in [(name, 16) for name in MODELS] + [("dlrm", 64)]:
            found: dict[str, list[dict[str, Any]]] = {}
            for seed in seeds:
                model = trained(work, log, name, dim, seed)
                for formats in () if arguments.train else (*UNIFORM, "searched") if dim == 16 else ROWS:
                    key = f"{log.stem}-{name}-{dim}-{seed}-{formats}"
                    made = kept(work / "cells", key, cell, model, work / log.stem, formats, arguments.rows)
                    found.setdefault(formats, []).append(made)
                print(f"{log.stem} {name} {dim}, seed {seed}: done", file=sys.stderr, flush=True)
            if found:
                table(f"{log.stem}, {name}, dim {dim}", found)
                kept_to += [one["value"] <= BUDGET for one in found.get("searched", [])]
        verdicts.append((log.stem, sum(kept_to), len(kept_to)))
    for name, met, count in verdicts if not arguments.train else ():
        goal = count - count // 9
        verdict = "met" if met >= goal else "missed"
        print(f"TARGET {name}, searched within 0.02 % of NE on test: {met} of {count} (goal {goal}) {verdict}")


if __name__ == "__main__":
    main()
