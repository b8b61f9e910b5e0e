"""What fewer bits cost in quality, for served models: uniform formats beside what
`sparrow quantize` finds.

    python benchmarks/quantize.py --globo REQUESTS.parquet --work WORK   # an hour, one core; resumable
    python benchmarks/quantize.py --widest                               # two minutes, on a machine that is quiet
    python benchmarks/quantize.py --quick                                # a small generated log, one seed, a minute

Two logs: Globo's requests of one session in five, and a generated one of a million rows. DLRM,
DCNv2 and Wukong with vectors of 16 numbers, and DLRM with 64, are trained with the defaults of
`sparrow train`, three seeds each, and exported. Then formats are changed, and NE of the *test* part
is compared, row by row, with that of fp32. `quantize` sees the training and valid parts alone.
Models are kept in WORK, so that a stopped run goes on where it was.

With --widest, the widest DCNv2 is looked for that answers 100 candidates within 10 ms (99 of 100
requests, one thread), in fp32 and with products of int8, and their FLOP are compared: how much
larger a model may be. What its weights are does not matter for that.

"int4" are rows between their least and largest number, "int4 greedy" those of a range search.
"searched" is `quantize` with a budget of 0.02 % of NE; what it promised is printed beside what
came.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _peers.cells import kept
from _peers.targets import print_target
from _peers.tiny import sized
from row_formats import processor

from sparrow import data
from sparrow.analysis.judge import Judge
from sparrow.apps.bits.calibrate import observe
from sparrow.apps.bits.quantize import last, quantize
from sparrow.apps.bits.variants import TABLES, Variants
from sparrow.apps.fewer.parts import rises
from sparrow.apps.generate import generate
from sparrow.core import Batch
from sparrow.embeddings.spec import Component
from sparrow.features.schema import Schema, Split
from sparrow.kernels.formats import int4
from sparrow.models import Offset, dcnv2, dlrm, wukong
from sparrow.serving import Scorer, load, products
from sparrow.serving.export import export
from sparrow.serving.scorer import assemble, table_file
from sparrow.trained.build import tables_of, untrained
from sparrow.trained.run import Data, Log, Run
from sparrow.training import train

RECIPES = Path(__file__).parents[1] / "recipes"
BUDGET = 2e-4
CANDIDATES, LIMIT_MS = 100, 10.0
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
WHOLE = sized(tuple(UNIFORM), ("int4 rows", "int4, int8"))
RUNS = sized([*((name, 16) for name in MODELS), ("dlrm", 64)], [("dlrm", 16)])  # model, dim
ROWS = ("int4 rows", "int4 greedy rows")  # alone with vectors of 64 numbers


def trained(work: Path, log: Path, name: str, dim: int, seed: int) -> Path:
    """A model folder, made when it is not there."""
    place = work / f"{log.stem}-{name}-{dim}-{seed}"
    out = place / "model"
    if not out.exists():
        run = Run(
            run_dir=str(place / "run"),
            data=Data(path=str(work / log.stem)),
            model=MODELS[name](dim),
            threads=1,
            seed=seed,
            log=Log(tensorboard=False),
        )
        train(run, overwrite=True)
        export(place / "run", out, [log])
    return out


def cell(model: Path, prepared: Path, name: str, rows: int) -> dict[str, Any]:
    """What one change of formats does: rise of NE in the test part as a share of it, its error, and
    bytes.
    """
    torch.set_num_threads(1)
    dataset = data.open(prepared)
    test = next(iter(dataset.loader(dataset.rows("test"), split="test", dedup="off")))
    judge = Judge(test, prepared)
    scorer = load(model)
    before = judge.ne_of(scorer.scores)
    with tempfile.TemporaryDirectory() as folder:
        if name == "searched":
            done = quantize(model, Path(folder) / "out", prepared, budget=BUDGET, rows=rows)
            after = judge.ne_of(done.scorer.scores)
            best, promised = done.result.best, done.result.checked.upper
            found = {
                "promised": promised,
                "bytes": done.bytes_of(best.choice),
                "whole": done.bytes_of({}),
            }
        else:
            tables, few = UNIFORM[name]
            seen = observe(scorer.model, scorer.scores, last(dataset, rows))
            variants = Variants(
                scorer, seen, Path(folder), MIN_MAX if name == "int4 rows" else TABLES
            )
            choice = {part: part.steps[0] for part in variants.parts(tables, few)}
            after = judge.ne_of(variants.score(choice))
            every = variants.parts("int4", "int8")
            of = {(part.kind, part.name): step for part, step in choice.items()}
            found = {
                "bytes": sum(
                    variants.bytes_of(part, of.get((part.kind, part.name), "fp32"))
                    for part in every
                ),
                "whole": sum(variants.bytes_of(part, "fp32") for part in every),
            }
    rise = rises(before, after)
    return {
        "ne": before[0].value,
        "value": rise.value,
        "error": rise.error,
        "upper": rise.upper,
        **found,
    }


def table(title: str, found: dict[str, list[dict[str, Any]]]) -> None:
    """Print means over seeds, of the rise of NE in percent of it."""
    print(f"\n{title}; NE {statistics.mean(one['ne'] for one in next(iter(found.values()))):.4f}")
    print(
        f"{'formats':18} {'rise, %':>10} {'seeds':>9} {'rows':>9} {'bytes':>12} {'times fewer':>12}"
    )
    for name, cells in found.items():
        values = [100 * one["value"] for one in cells]
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        error = 100 * math.sqrt(statistics.mean(one["error"] ** 2 for one in cells))
        size, whole = (statistics.mean(one[of] for one in cells) for of in ("bytes", "whole"))
        print(
            f"{name:18} {statistics.mean(values):+10.4f} {spread:9.4f} {error:9.4f} {size:12,.0f}"
            f" {whole / size:12.1f}"
            + (
                ""
                if name != "searched"
                else f"   promised {100 * max(one['promised'] for one in cells):+.4f} at most"
            )
        )


def logs(arguments: argparse.Namespace, work: Path) -> list[Path]:
    """The raw logs; they are prepared."""
    made = work / "generated.parquet"
    if not made.exists():
        generate(made, rows=sized(20_000, 1_000) if arguments.quick else 1_000_000, seed=1)
    found, schemas = [made], {made: None}
    if arguments.globo is not None:
        place = work / "globo.parquet"
        if not place.exists():
            place.symlink_to(arguments.globo.resolve())
        found.append(place)
        schemas[place] = replace(Schema.load(RECIPES / "globo.schema.toml"), split=Split(by="time"))
    for log in found:
        if not (work / log.stem).exists():
            data.prepare([log], work / log.stem, schema=schemas[log])
    return found


def wide(base: Scorer, width: int, batch: Batch) -> dict[str, tuple[Scorer, float]]:
    """A DCNv2 with random weights, in fp32 and in int8, with its MFLOP a row."""
    torch.manual_seed(0)
    run = replace(base.run, model=dcnv2.Config(dim=16, deep=(width, width // 2)))
    rows = {
        component.name: base.stack.rows[table_file(component.name)]
        for component in components(base)
    }
    dense = dict(Offset(untrained(run, base.schema, run.placement), base.schema).state_dict())
    exact = replace(
        base,
        run=run,
        model=assemble(run, base.schema, lambda c: rows[c.name], dense, {}, base.folder.path),
    )
    seen = observe(exact.model, exact.scores, [batch])
    few_bits = {}
    for site, of in seen.items():
        few_bits |= products.name_fields(
            site, "int8", products.format_of("int8").encode(of.weight_OI, of.range)
        )
        del dense[site]
    few = replace(
        base,
        run=run,
        model=assemble(run, base.schema, lambda c: rows[c.name], dense, few_bits, base.folder.path),
    )
    flops = sum(of.flops for of in seen.values()) / 1e6
    return {"fp32": (exact, flops), "int8": (few, flops)}


def components(scorer: Scorer) -> list[Component]:
    """Those of all tables."""
    return [
        record.component for tables in tables_of(scorer.model) for record in tables.all_records()
    ]


def widest(work: Path) -> None:
    """Look for the widest models, and print what each width takes."""
    base, requests = load(trained(work, work / "generated.parquet", "dcnv2", 16, 0)), 300
    rows = base.golden_rows()[1][:CANDIDATES]
    user = {"user": 7, "history": [3, 12, 40]}
    candidates = [{name: of for name, of in row.items() if name not in user} for row in rows]
    batch = base.encoder.batch(rows)
    found = {"fp32": 0.0, "int8": 0.0}
    width, open_ = 512, set(found)
    while open_:
        for name, (scorer, flops) in wide(base, width, batch).items():
            if name not in open_:
                continue
            taken = []
            for _ in range(requests):
                begun = time.perf_counter()
                scorer.rank(user, candidates)
                taken.append(1e3 * (time.perf_counter() - begun))
            p50, p99 = np.percentile(taken, [50, 99])
            print(
                f"deep ({width:5}, {width // 2:5}) {flops:8.1f} MFLOP a row, {name}: p50 {p50:6.2f}"
                f" p99 {p99:6.2f} ms"
            )
            if p99 <= LIMIT_MS:
                found[name] = flops
            if p50 > LIMIT_MS:
                open_.discard(name)
        width = int(width * 1.2) // 16 * 16
    times = found["int8"] / found["fp32"]
    print(
        f"widest within {LIMIT_MS} ms at 1 x {CANDIDATES}: {found['fp32']:.1f} and"
        f" {found['int8']:.1f} MFLOP a row"
    )
    print(
        f"int8 over fp32: {times:.1f} times the FLOP (the paper says: up to 5 times more complex"
        " models)"
    )


def main() -> None:
    """Train what is not there, measure, and say which goals are met."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--globo", type=Path, help="requests of one session in five")
    parser.add_argument(
        "--work",
        type=Path,
        help="where models and results are kept; a folder of its own unless told",
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=50_000, help="by which `quantize` chooses")
    parser.add_argument(
        "--train", action="store_true", help="train what is not there, and measure nothing"
    )
    parser.add_argument("--widest", action="store_true", help="look for the widest model instead")
    parser.add_argument("--quick", action="store_true", help="a small generated log, one seed")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as own:
        run(arguments, arguments.work or Path(own))


def run(arguments: argparse.Namespace, work: Path) -> None:
    """See `main`."""
    work.mkdir(exist_ok=True, parents=True)
    torch.set_num_threads(1)
    seeds: Sequence[int] = range(1 if arguments.quick else arguments.seeds)
    print(
        f"{processor()}; torch {torch.__version__}; {len(seeds)} seeds; rises of NE in the test"
        " part, in % of it"
    )
    if arguments.widest:
        logs(arguments, work)
        widest(work)
        return
    verdicts = []
    for log in logs(arguments, work):
        kept_to = []
        for name, dim in RUNS:
            found: dict[str, list[dict[str, Any]]] = {}
            for seed in seeds:
                model = trained(work, log, name, dim, seed)
                for formats in (
                    () if arguments.train else (*WHOLE, "searched") if dim == 16 else ROWS
                ):
                    key = f"{log.stem}-{name}-{dim}-{seed}-{formats}"
                    made = kept(
                        work / "cells", key, cell, model, work / log.stem, formats, arguments.rows
                    )
                    found.setdefault(formats, []).append(made)
                print(f"{log.stem} {name} {dim}, seed {seed}: done", file=sys.stderr, flush=True)
            if found:
                table(f"{log.stem}, {name}, dim {dim}", found)
                kept_to += [one["value"] <= BUDGET for one in found.get("searched", [])]
        verdicts.append((log.stem, sum(kept_to), len(kept_to)))
    for name, met, count in verdicts if not arguments.train else ():
        goal = count - count // 9
        is_met = met >= goal
        print_target(
            f"{name}, searched within 0.02 % of NE on test", f"{met} of {count}", goal, is_met
        )


if __name__ == "__main__":
    main()
