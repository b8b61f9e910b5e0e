"""What number formats of products, formats of dense weights, and settings of layers cost in
quality.

    python benchmarks/precision_quality.py GLOBO_REQUESTS.parquet --cells CELLS   # about half an hour, one core
    python benchmarks/precision_quality.py --quick                                # a small made log, in a minute

GLOBO_REQUESTS.parquet is the Globo request log of one session in five. Its first --rows are taken,
in time order. A model passes once over three quarters of the requests. NE is of a fifth of them,
drawn at random (--split ratio). With --split time it is of the last fifth of the whole log, whose
articles are mostly new. The rest, a twentieth, tells id dropout how many ids are new. Rates and
batches are those of `recipes/globo.toml`, one thread.

Seeds are paired: for a seed, all settings have the same first weights and the same order of rows.
Differences are means over seeds of the paired differences in per cent of NE, with standard errors.
A model that is too sure of itself has a lower NE once rounding blurs it. So NE is also taken after
the scale and offset of the logits that are best for the judged rows ("scaled"): what is lost there
is knowledge.

`cast`: a model that was trained in fp32 is evaluated in each precision.

`trained`: a model is trained and evaluated in each precision; and dense weights in few bits, at the
recipe's rate and at a tenth of it, where Adam's steps are smaller than half of a last bit of many
weights. `moved` is the share of dense weights that end farther from their first value than 2^-7 of
it, a last bit of bf16 at most. `e4m3-gradients` has gradients in E4M3 without a scale.

`layers`: no bias but the last layer's, block norms, hard-swish, alone and together. Times of a step
are of forward, backward and table update on held batches, in the thread's own time; sides take
turns, and ratios are medians.

Results are kept in CELLS, so that a stopped run goes on where it was.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from _peers.cells import kept
from _peers.stats import paired, spread
from _peers.targets import print_target
from _peers.tiny import sized
from row_formats import processor
from torch import Tensor

from sparrow import data
from sparrow.apps.generate import generate
from sparrow.core.memory import keep_freed_memory
from sparrow.extensions import low_precision
from sparrow.extensions.low_precision.precision import MEMBERS, Member
from sparrow.extensions.low_precision.recipe import OPERANDS, Operand, Recipe
from sparrow.features.schema import Schema, Split
from sparrow.kernels.quantise import rounded
from sparrow.layers.precision import Precision, computing
from sparrow.layers.precisions import PRECISIONS
from sparrow.layers.precisions.bf16 import lacks_bf16
from sparrow.losses import loss_and_probabilities
from sparrow.metrics import ne
from sparrow.numerics.formats import FORMATS
from sparrow.trained.build import scoring
from sparrow.trained.run import Run
from sparrow.training.loop import Trainer

RECIPES = Path(__file__).parents[1] / "recipes"
EIGHT = ("mxint8", "mx9", "fp8", "mxfp8")
SIX = ("mxfp6", "mx6")
FOUR = ("mxfp4", "mx4")
GOALS = {  # of a cast, per cent of NE: at most, or above
    **dict.fromkeys(("bf16", "mxint8", "mx9"), (0.0, 0.02)),
    **dict.fromkeys(("fp8", "mxfp8", "mxfp6", "mx6"), (0.0, 0.15)),
    **dict.fromkeys(FOUR, (0.3, 0.0)),
}
MEASURES = ("ne", "scaled")
CASES = ("cast", "trained", "layers")
MODELS = ("dcnv2", "wukong", "masknet")
FORMATTED = ("dcnv2", "wukong")  # models that are cast and trained in formats
LAYERED = ("wukong", "masknet")  # models with all that the settings of layers change
CASTS = ("bf16", "bf16-nearest", "bf16-truncate", *EIGHT, *SIX, "mxfp4", "mxfp4-ceil", "mx4")
TRAINED = ("bf16", *EIGHT, *SIX, *FOUR, "e4m3-gradients")
WEIGHTS = ("bf16", "bf16-stochastic", "split")
SLOW = 1e-4  # a tenth of the recipe's rate of dense weights
LAYERS: dict[str, dict[str, Any]] = {
    "no bias": {"bias": False},
    "block norm": {"norm": "block"},
    "hard-swish": {"activation": "hard-swish"},
    "all three": {"bias": False, "norm": "block", "activation": "hard-swish"},
}
# rows that this file adds to tables of the package
OPERANDS["mxfp4-ceil"] = Operand(dataclasses.replace(FORMATS["mxfp4"], rule="ceil"))
MEMBERS["mxfp4-ceil"] = Member(Recipe.of("mxfp4-ceil"))
# as bf16-truncate, but for the rounding
MEMBERS["bf16-nearest"] = Member(Recipe.of("bf16"), torch.float32)
BF16 = ("bf16", "bf16")
MEMBERS["e4m3-gradients"] = Member(
    Recipe(forward=BF16, input_gradient=("e4m3", "bf16"), weight_gradient=("e4m3", "bf16"))
)
NAMES: Any = low_precision.EXTENSION.members[PRECISIONS.package]
NAMES |= dict.fromkeys(("mxfp4-ceil", "bf16-nearest", "e4m3-gradients"), "precision")

Cell = dict[str, Any]
Cells = dict[tuple[str, str], list[Cell]]
"""(model, setting) -> what each seed gave."""


# -- runs ------------------------------------------------------------------------------------------


def run_of(
    log: Path, model: str, seed: int, place: str, leaves: Mapping[str, Any], batch_size: int
) -> Run:
    """A run of the Globo recipe's rates, with other settings."""
    recipe = RECIPES / f"globo_{model}.toml"
    changes = {
        "model.name": model,
        "data.path": str(log),
        "run_dir": place,
        "seed": seed,
        "threads": 1,
    }
    changes |= {"log.tensorboard": False, "checkpoint.every": 1_000_000, "loop.progressive": False}
    changes |= {"data.batch_size": batch_size, "data.shuffle": False}
    return Run.load(recipe if recipe.exists() else RECIPES / "globo.toml", {**changes, **leaves})


def measured(scores_N: Tensor, labels_N: Tensor) -> dict[str, float]:
    """NE, and NE of sigmoid(a logit + b) with the a and b that are best for these rows, by Newton's
    method.
    """
    logits_N2 = torch.stack(
        [torch.logit(scores_N.double(), eps=1e-7), torch.ones(len(scores_N))], 1
    ).double()
    best_2 = torch.tensor([1.0, 0.0], dtype=torch.float64)
    for _ in range(20):
        p_N = torch.sigmoid(logits_N2 @ best_2)
        curved_22 = (logits_N2 * (p_N * (1 - p_N))[:, None]).t() @ logits_N2
        best_2 -= torch.linalg.solve(curved_22, logits_N2.t() @ (p_N - labels_N.double()))
    return {
        "ne": ne(scores_N, labels_N),
        "scaled": ne(torch.sigmoid(logits_N2 @ best_2).float(), labels_N),
    }


def cell(
    log: Path,
    model: str,
    seed: int,
    leaves: Mapping[str, Any],
    casts: Iterable[str],
    batch_size: int,
) -> Cell:
    """NE of the last fifth of a run, and of the same weights in other precisions."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(run_of(log, model, seed, folder, leaves, batch_size))
        first = [p.detach().clone() for p in trainer.job.dense]
        begin = time.process_time()
        results = trainer.fit()
        taken = time.process_time() - begin
    assert results["stopped_by"] is None and results["skipped_steps"] == 0, results
    pairs = zip(trainer.job.dense, first, strict=True)
    moved = sum(int(((now - then).abs() > then.abs() * 2**-7).sum()) for now, then in pairs)
    dataset, run = trainer.job.dataset, trainer.job.run
    trainer.job.model.eval()

    def judge(precision: Precision) -> dict[str, float]:
        score = scoring(trainer.job.model, replace(run, precision=precision), dataset.schema)
        batches = dataset.loader(4000, split="test")
        with torch.no_grad():
            found = [(score(batch)[:, 0], batch.labels_BT[:, 0]) for batch in batches]  # type: ignore[index]
        return measured(*(torch.cat(of) for of in zip(*found, strict=True)))

    found = {name: judge(Precision(name)) for name in casts}
    share = moved / sum(p.numel() for p in first)
    return {**judge(run.precision), "casts": found, "moved": share, "seconds": taken}


def vanished(log: Path, model: str, batch_size: int) -> None:
    """Print what of the gradients of first weights is 0 with E4M3 gradients, without a scale and
    with one.
    """
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(run_of(log, model, 0, folder, {}, batch_size))
    batch = next(iter(trainer.job.dataset.loader(batch_size)))
    for tables in trainer.job.tables:
        tables.mode = "off"

    def zeros(precision: str) -> float:
        trainer.job.model.zero_grad()
        with computing(Precision(precision), torch.device("cpu")):
            loss_and_probabilities(trainer.job.model(batch), batch)[0].backward()
        named = trainer.job.model.named_parameters()
        grads = [
            p.grad for name, p in named if p.grad is not None and "head" not in name and p.dim() > 1
        ]
        return sum(int((grad == 0).sum()) for grad in grads) / sum(grad.numel() for grad in grads)

    told = ", ".join(f"{name} {zeros(name):.3f}" for name in ("fp32", "fp8", "e4m3-gradients"))
    print(f"{model}: share of first gradients of matrices before the head that are 0: {told}")


def logs(asked: argparse.Namespace, work: Path) -> Path:
    """The prepared log."""
    if asked.quick:
        made = work / "made.parquet"
        generate(made, rows=sized(20_000, 1_000), users=2_000, items=500)
        return data.prepare([made], work / "log", split=Split(by="time", valid=0.05, test=0.2)).out
    schema, source = Schema.load(RECIPES / "globo.schema.toml"), asked.globo
    if asked.split == "time":
        until = min(1.0, asked.rows / pq.ParquetFile(source).metadata.num_rows)
        split = Split(by="time", valid=0.05, test=0.2, until=until)
    else:
        source, split = work / "first.parquet", Split(by="ratio", valid=0.05, test=0.2)
        pq.write_table(pq.read_table(asked.globo).slice(0, asked.rows), source)
    return data.prepare([source], work / "log", schema=replace(schema, split=split)).out


# -- tables and verdicts ---------------------------------------------------------------------------


def gap(these: Sequence[float], those: Sequence[float]) -> tuple[float, float]:
    """Mean and standard error of paired differences, in per cent of the second."""
    return paired([100 * a / b for a, b in zip(these, those, strict=True)], [100.0] * len(those))


def nes(found: Cells, model: str, setting: str, what: str = "ne") -> list[float]:
    """NE of each seed, or what else was measured."""
    return [one[what] for one in found[model, setting]]


def target(name: str, value: float, error: float, goal: str, is_met: bool) -> None:
    """A line of a target."""
    print_target(name, f"{value:+.4f} +- {error:.4f} %", goal, is_met)


def casts_of(found: Cells, model: str, name: str, what: str) -> list[float]:
    """What was measured of each seed's fp32 run in another precision."""
    return [one["casts"][name][what] for one in found[model, "fp32"]]


def line(
    name: str, pairs: Sequence[tuple[Sequence[float], Sequence[float]]], more: str = ""
) -> None:
    """A row: paired differences in each measure."""
    told = "".join(
        f"{mean:+10.4f} +- {error:.4f} %" for mean, error in (gap(*pair) for pair in pairs)
    )
    print(f"  {name:<32}{told}{more}")


def show_casts(found: Cells, models: Iterable[str]) -> None:
    """Casts of fp32 runs."""
    for model in models:
        exact = {what: nes(found, model, "fp32", what) for what in MEASURES}
        print(
            f"\n{model}, cast: NE in fp32 {spread(exact['ne'])}, scaled {spread(exact['scaled'])}"
        )
        print(f"  {'':<32}{'NE':>21}{'scaled':>21}")
        for name in CASTS:
            line(name, [(casts_of(found, model, name, what), exact[what]) for what in MEASURES])
        for what, base in exact.items():
            for name, (above, most) in GOALS.items():
                mean, error = gap(casts_of(found, model, name, what), base)
                goal, is_met = (
                    (f"above {above}", mean > above) if above else (f"at most {most}", mean <= most)
                )
                target(f"{model}, {what}, cast to {name}", mean, error, goal, is_met)
            pairs = [("mxfp4 with ceil below floor", "mxfp4-ceil", "mxfp4", -1)]
            pairs += [("truncation above nearest", "bf16-truncate", "bf16-nearest", 1)]
            for told, one, other, sign in pairs:
                mean, error = gap(
                    casts_of(found, model, one, what), casts_of(found, model, other, what)
                )
                goal = "below 0" if sign < 0 else "above 0"
                target(f"{model}, {what}, {told}", mean, error, goal, sign * mean > 0)


def show_trained(found: Cells, models: Iterable[str]) -> None:
    """Runs in each precision, and with weights in few bits."""
    for model in models:
        exact = {what: nes(found, model, "fp32", what) for what in MEASURES}
        print(
            f"\n{model}, trained so: NE in fp32 {spread(exact['ne'])}, scaled"
            f" {spread(exact['scaled'])}"
        )
        print(f"  {'':<32}{'NE':>21}{'scaled':>21}")
        for name in TRAINED:
            line(name, [(nes(found, model, name, what), exact[what]) for what in MEASURES])
        for rate in ("", " slowly"):
            told = statistics.mean(nes(found, model, f"fp32{rate}", "moved"))
            print(f"  fp32{rate}: NE {spread(nes(found, model, f'fp32{rate}'))}, moved {told:.3f}")
            for name in (f"weights {weights}{rate}" for weights in WEIGHTS):
                told = statistics.mean(nes(found, model, name, "moved"))
                pairs = [
                    (nes(found, model, name, what), nes(found, model, f"fp32{rate}", what))
                    for what in MEASURES
                ]
                line(name, pairs, f", moved {told:.3f}")
        for what, base in exact.items():
            for name in ("bf16", *EIGHT, *SIX):
                mean, error = gap(nes(found, model, name, what), base)
                goal = "at most 0.05 or the error"
                target(
                    f"{model}, {what}, trained in {name}",
                    mean,
                    error,
                    goal,
                    mean <= max(0.05, error),
                )
            for name in FOUR:
                mean, error = gap(nes(found, model, name, what), base)
                cast, _ = gap(casts_of(found, model, name, what), base)
                goal = f"at most half of the cast's {cast:+.4f}"
                target(f"{model}, {what}, trained in {name}", mean, error, goal, mean <= cast / 2)
            mean, error = gap(nes(found, model, "e4m3-gradients", what), base)
            target(
                f"{model}, {what}, E4M3 gradients without a scale",
                mean,
                error,
                "above 0.3",
                mean > 0.3,
            )


def show_layers(
    found: Cells, models: Iterable[str], times: Mapping[tuple[str, str], tuple[float, float]]
) -> None:
    """Settings of layers."""
    for model in models:
        base = nes(found, model, "fp32")
        within = statistics.stdev(base)
        print(f"\n{model}, layers: NE {spread(base)}")
        print(
            f"  {'':<12}{'NE':>9}{'sd':>9}{'paired':>10}{'error':>8}  step, ms  over the default's"
        )
        for name in ("fp32", *LAYERS):
            ne, (mean, error) = nes(found, model, name), gap(nes(found, model, name), base)
            ms, ratio = times[model, name]
            print(
                f"  {name if name != 'fp32' else 'default':<12}{statistics.mean(ne):9.5f}{statistics.stdev(ne):9.5f}"
                f"{mean:+9.4f}%{error:8.4f}{ms:10.2f}{ratio:10.3f}"
            )
        for name in LAYERS:
            mean, error = gap(nes(found, model, name), base)
            goal = 100 * within / statistics.mean(base)
            target(
                f"{model}, {name}",
                mean,
                error,
                f"at most the seeds' spread, {goal:.4f}",
                mean <= goal,
            )


def step_times(
    log: Path, model: str, batch_size: int, turns: int
) -> dict[tuple[str, str], tuple[float, float]]:
    """(model, setting) -> milliseconds of a step, and the median of its ratios to the default's."""
    trainers = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("fp32", *LAYERS):
            leaves = leaves_of_layers(name)
            trainers[name] = Trainer(run_of(log, model, 0, f"{folder}/{name}", leaves, batch_size))
    batches = [
        batch
        for batch, _ in zip(trainers["fp32"].job.dataset.loader(batch_size), range(4), strict=False)
    ]
    taken: dict[str, list[float]] = {name: [] for name in trainers}
    for turn in range(turns):
        for name, trainer in trainers.items():
            batch = batches[turn % len(batches)]
            start = time.thread_time()
            loss_and_probabilities(trainer.job.model(batch), batch)[0].backward()
            for tables in trainer.job.tables:
                tables.update()
            taken[name].append(time.thread_time() - start)
            trainer.job.model.zero_grad()
    found = {}
    for name, each in taken.items():
        ratios = [a / b for a, b in zip(each, taken["fp32"], strict=True)]
        found[model, name] = (
            1e3 * statistics.median(each),
            statistics.median(ratios[turns // 5 :]),
        )
    return found


def leaves_of_layers(name: str) -> dict[str, Any]:
    """The settings of a run."""
    return {f"layers.{key}": value for key, value in LAYERS.get(name, {}).items()}


def settings(cases: Iterable[str], model: str) -> dict[str, tuple[dict[str, Any], tuple[str, ...]]]:
    """Setting -> leaves of the run, and the precisions in which its weights are evaluated too."""
    found: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {}
    plain = ({}, CASTS if model in FORMATTED else ())
    if model in FORMATTED and {"cast", "trained"} & set(cases):
        found["fp32"] = plain
    if model in FORMATTED and "trained" in cases:
        found |= {name: ({"precision": name}, ()) for name in TRAINED}
        slow = {"dense.lr": SLOW}
        found |= {f"weights {name}": ({"precision.weights": name}, ()) for name in WEIGHTS}
        found["fp32 slowly"] = (slow, ())
        found |= {
            f"weights {name} slowly": ({"precision.weights": name, **slow}, ()) for name in WEIGHTS
        }
    if model in LAYERED and "layers" in cases:
        found["fp32"] = plain
        found |= {name: (leaves_of_layers(name), ()) for name in LAYERS}
    return found


def check() -> None:
    """The rows that this file adds are what they are called."""
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))

    def error(name: str) -> float:
        format, how = OPERANDS[name]
        assert format is not None
        return float((rounded(x, format, 1, how) - x).square().mean())

    assert error("mxfp4-ceil") != error("mxfp4") and error("bf16-truncate") > 2 * error("bf16")
    tiny = torch.full((4, 4), 1e-4)
    assert not rounded(tiny, FORMATS["e4m3"], 1).any() and rounded(tiny, FORMATS["fp8"], 1).all()


def main() -> None:
    """All settings, a seed after the other."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "globo", nargs="?", type=Path, help="the request log that globo_requests.py makes"
    )
    parser.add_argument(
        "--cells", type=Path, help="where results are kept; a folder of its own unless told"
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--rows", type=int, default=120_000, help="of the log, the first in time")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument(
        "--split", choices=("ratio", "time"), default="ratio", help="how rows to judge are taken"
    )
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument("--quick", action="store_true", help="20,000 rows of a made log, two seeds")
    asked = parser.parse_args()
    if not asked.globo and not asked.quick:
        parser.error("name the request log, or say --quick")
    torch.set_num_threads(1)
    keep_freed_memory()
    check()
    batch_size, seeds = (200, 2) if asked.quick else (1000, asked.seeds)
    with tempfile.TemporaryDirectory() as folder:
        log, found = logs(asked, Path(folder)), Cells()
        cells = asked.cells or Path(folder) / "cells"
        dataset = data.open(log)
        units = "without" if lacks_bf16(torch.device("cpu")) else "with"
        print(f"{processor()}, one thread, {units} bf16 units; {seeds} seeds")
        print(
            f"{dataset.rows('train'):,} rows to train on, {dataset.rows('test'):,} to judge;"
            f" batches of {batch_size}"
        )
        models = [model for model in asked.models if settings(asked.cases, model)]
        for model in models:
            for setting, (leaves, casts) in settings(asked.cases, model).items():
                for seed in range(seeds):
                    key = f"{model}-{setting.replace(' ', '-')}-{seed}"
                    job, of = partial(cell, log), dataset.fingerprint
                    one = kept(cells, key, job, model, seed, leaves, casts, batch_size, of=of)
                    found.setdefault((model, setting), []).append(one)
                    print(
                        f"{key}: NE {one['ne']:.5f}, {one['seconds']:.1f} s",
                        file=sys.stderr,
                        flush=True,
                    )
        formatted, layered = (
            [model for model in of if model in models] for of in (FORMATTED, LAYERED)
        )
        if "cast" in asked.cases:
            show_casts(found, formatted)
        if "trained" in asked.cases:
            show_trained(found, formatted)
            for model in formatted:
                vanished(log, model, batch_size)
        if "layers" in asked.cases:
            times = {}
            for model in layered:
                times |= step_times(log, model, batch_size, 20 if asked.quick else 100)
            show_layers(found, layered, times)


if __name__ == "__main__":
    main()
