"""What `sparrow tables RUN --budget` promises, beside what trainings say.

    python benchmarks/tables_budget.py --cells CELLS          # a generated log, an hour, resumable
    python benchmarks/tables_budget.py --logs globo census_kdd ml_100k --data DIR --parts budgets
    --cells CELLS
    python benchmarks/tables_budget.py --globo REQUESTS       # one session in five of Globo; a thousand tables
    python benchmarks/tables_budget.py --quick                # a small log, one seed

A DLRM of 16 dimensions is trained on each log. The generated one has users and items that follow
Zipf's law. Of Globo it is one session in twenty, split by time; rows of the others are split at
random.

Budgets. At 1/4 and 1/16 of the bytes to train, the plan of the command is trained beside single
methods. A single method is the same addressing or format for all tables but the smallest, with the
largest size that keeps to the bytes. Where "cut" cannot be, since ids are not numbered by
frequency, a table is hashed.
All train at the same learning rate and with seeds that the command did not use. What the command
promises should be within two standard errors of what training gives, and the best of the single
methods no more than two standard errors below the plan.

Expected and trained. Twenty choices, ten for the table of users and ten for that of items. The
expected damage is that of rows put into the trained run, or for int4 and factors of short
trainings. The trained damage is the mean over seeds of the rise of NE in the valid part, each seed
beside the plain tables' run of the same seed. The goal is a rank correlation (Spearman) of 0.8.

Time. The choice for a thousand tables, with damages given: choices with their bytes, and the
knapsack.
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
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _peers import raw_logs
from _peers.cells import kept
from _peers.stats import paired
from _peers.targets import print_target
from _peers.tiny import sized

from sparrow import data
from sparrow.analysis.judge import judges
from sparrow.analysis.usage import count_usage
from sparrow.apps.generate import generate
from sparrow.apps.smaller.alternatives import Alternative, Bytes, alternatives
from sparrow.apps.smaller.budget import LEAST_SHARE, propose
from sparrow.apps.smaller.damage import Rebuilt, in_floats
from sparrow.apps.smaller.learned_hash import fit
from sparrow.apps.smaller.plans import Option, Plan, choose_plan
from sparrow.apps.smaller.trainings import by_training
from sparrow.core.memory import keep_freed_memory
from sparrow.data.meaning.inference import infer
from sparrow.embeddings import Numbering, TableChoices
from sparrow.embeddings.choices import Override
from sparrow.features.schema import Column, Encoding, Schema, Split
from sparrow.trained.build import tables_of
from sparrow.trained.run import Run
from sparrow.trained.scorer import Restored, restore
from sparrow.training import train
from sparrow.training.preflight import dense_state

MADE = {
    "rows": 400_000,
    "users": 8_000,
    "items": 8_000,
    "zipf": 1.05,
    "categorical": 4,
    "numeric": 2,
    "history": 0,
}
QUICK = MADE | {"rows": sized(20_000, 1_000), "users": 500, "items": 500}
TABLES = ("user", "item")
FORMATS = ("fp16", "int8", "int4")
SIZED = ("hashed", "cut", "learned", "mult", "coprime", "path")  # by rows
STEPS = 1000  # of the share of the rows
OTHER_SEEDS = 101  # the first of those that the command does not use
RECIPES = Path(__file__).parents[1] / "recipes"


def quiet(what: str, done: int, total: int) -> None:
    """Progress that nobody watches."""


def run_of(
    log: Path,
    place: Path,
    seed: int,
    overrides: Sequence[dict[str, Any]],
    asked: argparse.Namespace,
) -> Run:
    """A run with these overrides."""
    settings = {
        "run_dir": str(place),
        "model.name": "dlrm",
        "model.dim": 16,
        "seed": seed,
        "threads": 1,
    }
    settings |= {"log.tensorboard": False, "tables.overrides": list(overrides)}
    return Run.of(log, settings | ({"data.batch_size": 128} if asked.quick else {}))


def trained_ne(
    log: Path, asked: argparse.Namespace, overrides: Sequence[dict[str, Any]], seed: int
) -> float:
    """NE of the valid part after a training."""
    with tempfile.TemporaryDirectory() as folder:
        results = train(run_of(log, Path(folder), seed, overrides, asked))
    assert results["stopped_by"] is None, "stopped by a signal: the rest of the log was not seen"
    return float(results["valid"]["ne"])


def generated(asked: argparse.Namespace, work: Path) -> Path:
    """A prepared log of users and items that follow Zipf's law."""
    made = work / "made.parquet"
    generate(made, seed=asked.draw, **(QUICK if asked.quick else MADE))  # type: ignore[arg-type]
    schema = infer([made])
    by_frequency = {name: Encoding(kind="vocabulary", min_count=1) for name in TABLES}
    return data.prepare(
        [made], work / "log", schema=replace(schema, encodings=schema.encodings | by_frequency)
    ).out


def real(name: str, folder: Path, work: Path) -> Path:
    """A prepared log of the folder of real sets, without a test part."""
    if name == "globo":
        (file,) = raw_logs.globo(folder, work, every=20).arguments
        schema = Schema.load(RECIPES / "globo.schema.toml")
        return data.prepare(
            [file], work / "log", schema=replace(schema, split=replace(schema.split, valid=0.1))
        ).out
    file, *arguments = raw_logs.SETS[name](folder, work).arguments
    label = arguments[1] if arguments[:1] == ["--label"] else None
    schema = infer([file], label=label)
    split = Split(by="ratio", valid=0.1, test=0.0)
    return data.prepare([file], work / "log", schema=replace(schema, split=split)).out


class Bench:
    """A log with a trained run, and trainings that are kept by name."""

    def __init__(self, asked: argparse.Namespace, name: str, work: Path) -> None:
        self.asked, self.cells, self.name = asked, asked.cells or work / "cells", name
        self.log = generated(asked, work) if name == "generated" else real(name, asked.data, work)
        self.of = data.open(self.log).fingerprint
        self.run_dir = work / "run"
        train(run_of(self.log, self.run_dir, 0, [], asked))
        self.maps = self.cells / "maps"
        self.maps.mkdir(parents=True, exist_ok=True)
        found = restore(self.run_dir)
        self.run, self.dense = found.run, dense_state(found.run)
        self.specs = {spec.name: spec for tables in tables_of(found.model) for spec in tables.specs}
        self.bytes = {
            name: Bytes.from_spec(spec, self.dense).to("train") for name, spec in self.specs.items()
        }
        enough = LEAST_SHARE * sum(self.bytes.values())
        self.free = [name for name, size in self.bytes.items() if size >= enough]

    def trained(self, name: str, overrides: Sequence[dict[str, Any]]) -> list[float]:
        """NE of each seed."""
        job, found = partial(trained_ne, self.log, self.asked), []
        for seed in range(OTHER_SEEDS, OTHER_SEEDS + self.asked.seeds):
            found.append(kept(self.cells, f"{name}-{seed}", job, list(overrides), seed, of=self.of))
            print(f"{self.name}, {name}, seed {seed}: {found[-1]:.4f}", file=sys.stderr, flush=True)
        return found

    def map_of(self, table: str, rows: int) -> str:
        """A file with a learned map."""
        path = self.maps / f"{table}-{rows}-{self.of[:8]}.map"
        if not path.exists():
            fit(data.open(self.log), table, rows, quiet).save(path)
        return str(path)

    def spec_with(self, table: str, change: dict[str, Any]) -> Any:
        """What a table becomes."""
        spec = self.specs[table]
        ids = Numbering.of(data.open(self.log).schema.encodings[table])
        own = Override(names=(table,), **change).on(self.run.tables.alone(table, ids.rows))
        return own.spec(table, spec.dim, ids, spec.init_scale)


# -- expected and trained --------------------------------------------------------------------------


def changes(bench: Bench, table: str) -> dict[str, dict[str, Any]]:
    """Ten choices for a table."""
    rows = bench.specs[table].components[0].rows
    shares = (("hashed", 2), ("hashed", 10), ("hashed", 30), ("cut", 4), ("cut", 10), ("cut", 30))
    found: dict[str, dict[str, Any]] = {
        f"{name} 1/{part}": {"addressing": {"name": name, "rows": max(3, round(rows / part))}}
        for name, part in shares
    }
    tenth = max(3, round(rows / 10))
    return found | {
        "mixed 4": {"addressing": {"name": "mixed_dimension", "dims": [4]}},
        "learned 1/10": {"addressing": {"name": "learned", "file": bench.map_of(table, tenth)}},
        "int4": {"format": {"name": "int4"}},
        "mult 16": {
            "addressing": {"name": "quotient_remainder", "operation": "mult", "collisions": 16}
        },
    }


def expected(
    bench: Bench, every: dict[str, tuple[str, dict[str, Any]]]
) -> dict[str, tuple[float, float]]:
    """Name -> the damage that the command would tell, and its error."""
    found = restore(bench.run_dir)
    dataset = data.open(bench.log)
    of_rows = judges(dataset, 20_000)
    uses, _ = count_usage(found, dataset, (), quiet)
    rebuilds = Rebuilt(in_floats(found), {use.name: use.hits_R for use in uses})
    base, told = of_rows[0].ne(rebuilds.restored), dict[str, tuple[float, float]]()
    bold: dict[str, Plan] = {}
    for name, (table, change) in every.items():
        spec = bench.spec_with(table, change)
        is_bold = change.get("format", {}).get("name") == "int4" or "collisions" in change.get(
            "addressing", {}
        )
        how: Any = "trained" if is_bold else "rebuilt"
        one = Alternative(
            change=change, spec=spec, bytes=Bytes.from_spec(spec, bench.dense), how=how
        )
        if is_bold:
            bold[name] = Plan(options=(Option(alternative=one),), purpose="train", kind=name)
            continue
        with rebuilds.holding([one]) as held:
            rise = of_rows[0].ne(held) - base
        told[name] = (rise.value, rise.error)
    how = {"examples": dataset.rows() // 4, "seeds": 2}
    verdict = by_training(
        bench.run, bench.run_dir, dataset, list(bold.values()), of_rows, **how, progress=quiet
    )
    return told | {one.plan.kind: (one.damage, one.error) for one in verdict.plans}


def spearman(x: Sequence[float], y: Sequence[float]) -> float:
    """The correlation of ranks; damages are never equal."""
    ranks = [np.argsort(np.argsort(values)) for values in (x, y)]
    return float(np.asarray(np.corrcoef(ranks))[0, 1])


def compare(bench: Bench) -> None:
    """A line for each choice, and the rank correlation."""
    every = {
        f"{table} {name}": (table, change)
        for table in TABLES
        for name, change in changes(bench, table).items()
    }
    promised = kept(
        bench.cells, "expected", partial(expected, bench, every), of=(bench.of, sorted(every))
    )
    plain = bench.trained("plain", [])
    print(
        f"\nexpected and trained rise of NE, {len(plain)} seeds; plain tables"
        f" {statistics.mean(plain):.4f}"
    )
    print(f"{'choice':<20}{'expected':>10}{'error':>9}{'trained':>10}{'error':>9}")
    means = []
    for name, (table, change) in every.items():
        rise, error = paired(
            bench.trained(name.replace(" ", "-").replace("/", "o"), [{"names": [table], **change}]),
            plain,
        )
        means.append(rise)
        print(
            f"{name:<20}{promised[name][0]:+10.4f}{promised[name][1]:9.4f}{rise:+10.4f}{error:9.4f}"
        )
    told = spearman([promised[name][0] for name in every], means)
    print_target(f"Spearman over {len(every)} choices", f"{told:.2f}", "0.8", told >= 0.8)


# -- budgets ---------------------------------------------------------------------------------------


def single(bench: Bench, method: str, share: float) -> list[dict[str, Any]]:
    """The overrides of a method whose components, or the first of them, have this share of the
    rows.
    """
    found = []
    encodings = data.open(bench.log).schema.encodings
    for name in bench.free:
        ids = bench.specs[name].components[0].rows
        rows = max(3, round(share * ids))
        is_cut = method == "cut" and Numbering.of(encodings[name]).order == "frequency"
        how: dict[str, Any] = {
            "name": "hashed" if method == "cut" and not is_cut else method,
            "rows": rows,
        }
        if method == "mult":
            how = {
                "name": "quotient_remainder",
                "operation": "mult",
                "sizes": [max(rows, 1 + math.isqrt(ids))],
            }
        if method == "coprime":
            rows = max(rows, 1 + math.isqrt(ids))
            how = {"name": "coprime", "operation": "mult", "sizes": [rows, coprime_to(rows, ids)]}
        if method == "learned":
            how = {"name": "learned", "file": bench.map_of(name, rows)}
        found.append({"names": [name], "addressing": how})
    return found


def coprime_to(m: int, ids: int) -> int:
    """The least second modulus."""
    other = max(2, -(-ids // m))
    while math.gcd(m, other) > 1:
        other += 1
    return other


def bytes_of(bench: Bench, overrides: Sequence[dict[str, Any]]) -> int:
    """Of all tables, to train."""
    sizes = dict(bench.bytes)
    for one in overrides:
        for name in one["names"]:
            change = {part: value for part, value in one.items() if part != "names"}
            sizes[name] = Bytes.from_spec(bench.spec_with(name, change), bench.dense).to("train")
    return sum(sizes.values())


def singles(bench: Bench, budget: int) -> dict[str, list[dict[str, Any]]]:
    """Each single method at the largest size that keeps to the budget."""
    found = {}
    for name in FORMATS:
        made = [{"names": bench.free, "format": {"name": name}}]
        if bytes_of(bench, made) <= budget:
            found[name] = made
    for columns in range(15, 0, -1):
        how = {"name": "mixed_dimension", "dims": [columns]}
        made = [{"names": bench.free, "addressing": how}]
        if bytes_of(bench, made) <= budget:
            found[f"mixed {columns}"] = made
            break
    for method in SIZED:
        low, high = 0, STEPS
        while high - low > 1:  # bytes grow with the rows
            middle = (low + high) // 2
            if method == "learned":
                size = learned_bytes(bench, middle / STEPS)
            else:
                size = bytes_of(bench, single(bench, method, middle / STEPS))
            low, high = (middle, high) if size <= budget else (low, middle)
        if low:
            found[f"{method} {low / STEPS:g}"] = single(bench, method, low / STEPS)
    return found


def learned_bytes(bench: Bench, share: float) -> int:
    """Of all tables with learned maps, which need not be fitted for that: rows, and 2 or 4 bytes an
    id.
    """
    whole = bytes_of(bench, single(bench, "hashed", share))
    for name in bench.free:
        ids = bench.specs[name].components[0].rows
        whole += ids * (2 if max(3, round(share * ids)) <= 1 << 15 else 4)
    return whole


def plan_of(bench: Bench, budget: int, share: int) -> dict[str, Any]:
    """What the command proposes: its overrides, the bytes, what it promises, and what rebuilt rows
    said.
    """
    maps = bench.maps / f"of-{bench.name}-{share}"
    settings = {"trainings": bench.asked.trainings, "examples": bench.asked.examples, "maps": maps}
    begun = time.perf_counter()
    said = propose(bench.run_dir, budget, "train", **settings, progress=quiet)
    took = time.perf_counter() - begun
    chosen = [one.alternative for one in said.plan.options if one.alternative.change]
    assert said.verdict is not None
    first = said.verdict.plans[0]
    return {
        "overrides": [{"names": [one.table], **one.change} for one in chosen],
        "told": [f"{one.table}: {one.description}" for one in chosen],
        "rebuilt": said.plan.damage if said.plan.is_measured else None,
        "rise": [first.damage, first.error],
        "share": said.verdict.share,
        "plans": [
            f"{p.plan.kind} {p.plan.bytes / 1e3:.1f} kB {p.damage:+.4f}" for p in said.verdict.plans
        ],
        "seconds": took,
    }


def budgets(bench: Bench) -> None:
    """The plan beside single methods."""
    whole, plain = sum(bench.bytes.values()), bench.trained("plain", [])
    rows = data.open(bench.log).rows()
    for share in (4, 16):
        budget = whole // share
        depends = (bench.of, bench.asked.trainings, bench.asked.examples)
        plan = kept(
            bench.cells, f"plan-{share}", partial(plan_of, bench), budget, share, of=depends
        )
        title = f"{bench.name}, {rows:,} training rows, 1/{share} of {whole / 1e6:.3f} MB to train"
        print(
            f"\n{title}; rise of NE, {len(plain)} seeds; plain tables {statistics.mean(plain):.4f}"
        )
        print("plan: " + "; ".join(plan["told"]))
        print(f"its trainings took {plan['seconds']:.0f} s: " + "; ".join(plan["plans"]))
        rivals = {"plan": plan["overrides"], **singles(bench, budget)}
        found = {
            name: bench.trained(f"{share}-{name.replace(' ', '-')}", made)
            for name, made in rivals.items()
        }
        for name in sorted(found, key=lambda name: statistics.mean(found[name])):
            rise, error = paired(found[name], plain)
            print(
                f"{name:<14}{bytes_of(bench, rivals[name]) / 1e3:9.1f} kB{rise:+10.4f} +-"
                f" {error:.4f}"
            )
        said = "" if plan["rebuilt"] is None else f"; rebuilt rows said {plan['rebuilt']:+.4f}"
        print(f"each short training took {100 * plan['share']:.0f} % of the run's steps{said}")
        verdicts(bench.name, share, plan, found, plain)


def verdicts(
    name: str, share: int, plan: dict[str, Any], found: dict[str, list[float]], plain: list[float]
) -> None:
    """Whether the promise was kept to, and whether a single method was better."""
    (promised, its_error), (rise, error) = plan["rise"], paired(found["plan"], plain)
    off, both = promised - rise, math.hypot(its_error, error)
    is_met = abs(off) <= 2 * both
    told = f"promised {promised:+.4f} +- {its_error:.4f}, trained {rise:+.4f} +- {error:.4f}"
    print_target(
        f"{name} 1/{share}",
        f"{told}; apart by {abs(off) / max(both, 1e-9):.1f} errors",
        "2",
        is_met,
    )
    if len(found) == 1:
        print("no single method keeps to these bytes")
        return
    best = min((one for one in found if one != "plan"), key=lambda one: statistics.mean(found[one]))
    gap, error = paired(found["plan"], found[best])
    is_met = gap <= 2 * error
    print_target(
        f"{name} 1/{share}",
        f"plan - {best} = {gap:+.4f} +- {error:.4f}",
        "at most two errors",
        is_met,
    )


# -- time ------------------------------------------------------------------------------------------


def thousand() -> None:
    """The choice for a thousand tables, damages given."""
    names = [f"t{number}" for number in range(1000)]
    columns = {
        "label": Column(kind="label"),
        **{name: Column(kind="categorical", table=name) for name in names},
    }
    encodings = {
        name: Encoding(kind="vocabulary", rows=100 + 7 * n * n) for n, name in enumerate(names)
    }
    schema, tables = Schema(columns=columns, encodings=encodings), TableChoices()
    specs = [tables.spec(name, 16, Numbering.of(encodings[name])) for name in names]
    run, begun, own = Run.of("nowhere", {}), time.perf_counter(), time.process_time()
    each = [alternatives(run, schema, spec, (2, 4)) for spec in specs]
    options = []
    for number, of in enumerate(each):
        whole = of[0].bytes.to("train")
        damages = [1e-4 * (1 + number % 13) * (whole / one.bytes.to("train") - 1) for one in of]
        options.append(
            [Option(alternative=one, damage=d) for one, d in zip(of, damages, strict=True)]
        )
    choose_plan(options, sum(of[0].bytes.to("train") for of in each) // 8, "train")
    took, own, count = time.perf_counter() - begun, time.process_time() - own, sum(map(len, each))
    claim = f"1,000 tables with {count:,} choices are chosen"
    figure = f"{took:.1f} s, {own:.1f} s of them by this process"
    print_target(claim, figure, 10, took < 10)


def globo(requests: Path, work: Path) -> None:
    """The command's time on real requests, and what it proposes."""
    schema = Schema.load(RECIPES / "globo.schema.toml")
    schema = replace(schema, split=replace(schema.split, valid=0.1))
    log = data.prepare([requests], work / "globo", schema=schema).out
    recipe = RECIPES / "globo.toml"

    def trained(name: str, seed: int, tables: TableChoices) -> Any:
        settings = {
            "data.path": str(log),
            "run_dir": str(work / name),
            "log.tensorboard": False,
            "threads": 1,
        }
        return train(
            replace(Run.load(recipe, settings | {"seed": seed}), tables=tables), overwrite=True
        )

    plain = Run.load(recipe).tables
    trained("plain", 0, plain)
    found: Restored = restore(work / "plain")
    dense = dense_state(found.run)
    whole = sum(
        Bytes.from_spec(spec, dense).to("train")
        for tables in tables_of(found.model)
        for spec in tables.specs
    )
    print(f"\nGlobo, {data.open(log).rows():,} training rows, {whole / 1e6:.1f} MB of tables")
    base = [trained("again", seed, plain)["valid"]["ne"] for seed in (101, 102, 103)]
    for share in (4, 16):
        begun = time.perf_counter()
        said = propose(
            work / "plain", whole // share, "train", maps=work / f"maps-{share}", progress=quiet
        )
        took = time.perf_counter() - begun
        assert said.verdict is not None
        first = said.verdict.plans[0]
        chosen = [one.alternative for one in said.plan.options if one.alternative.change]
        told = "; ".join(f"{one.table}: {one.description}" for one in chosen)
        tables = said.plan.run(said.run, "small").tables
        rise, error = paired(
            [trained("again", seed, tables)["valid"]["ne"] for seed in (101, 102, 103)], base
        )
        print(f"1/{share}: {told}; promised {first.damage:+.5f} +- {first.error:.5f}")
        print(
            f"trained {rise:+.5f} +- {error:.5f}, 3 seeds; plain tables {statistics.mean(base):.4f}"
        )
        print_target(f"Globo, 1/{share}", f"proposed in {took:.0f} s", "600", took < 600)


def main() -> None:
    """What was asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--cells", type=Path, help="where results are kept; a folder of its own unless told"
    )
    parser.add_argument("--seeds", type=int, default=6, help="of each training")
    parser.add_argument("--trainings", type=int, default=16, help="plans that the command trains")
    parser.add_argument(
        "--examples",
        type=int,
        default=500_000,
        help="rows that each of its trainings reads, at most",
    )
    parser.add_argument(
        "--logs", nargs="*", default=["generated"], help="generated, globo, census_kdd, ml_100k"
    )
    parser.add_argument("--data", type=Path, help="the folder of real sets")
    parser.add_argument("--draw", type=int, default=0, help="the seed of the generated log")
    parser.add_argument(
        "--parts", nargs="*", default=["budgets", "choices"], help="budgets, choices, or both"
    )
    parser.add_argument(
        "--globo", type=Path, help="requests of one session in five: only the time there"
    )
    parser.add_argument("--quick", action="store_true", help="a small log, one seed")
    asked = parser.parse_args()
    if asked.quick:
        asked.seeds, asked.trainings, asked.examples = 1, 2, 4_000
    torch.set_num_threads(1)
    keep_freed_memory()
    with tempfile.TemporaryDirectory() as folder:
        if asked.globo:
            globo(asked.globo, Path(folder))
            thousand()
            return
        parts: dict[str, Callable[[Bench], None]] = {"budgets": budgets, "choices": compare}
        for name in asked.logs:
            (Path(folder) / name).mkdir()
            bench = Bench(asked, name, Path(folder) / name)
            for part in asked.parts:
                parts[part](bench)


if __name__ == "__main__":
    main()
