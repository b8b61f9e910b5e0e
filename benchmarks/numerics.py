"""What the probe, MERE and the dispatch of `sparrow numerics` are worth.

    python benchmarks/numerics.py                    # about twenty minutes, one core
    python benchmarks/numerics.py --quick            # about a minute, the same checks
    python benchmarks/numerics.py --cases cost

Logs are generated (`sparrow.apps.generate`: categorical columns, numbers, a time), models are DCNv2
and Wukong with their defaults, three seeds, each trained for an epoch in fp32 with `--probe`.

`inputs`: MERE_tau of each product under learned inputs, over that under the log's own; for each
pass, in five precisions. Weights are the run's, or drawn too. Beside it N(0, 1) for all operands.
"factor" is the geometric mean over products of the ratio, and "off" that of the ratio or its
inverse, whichever is above 1: what one product may expect.

`faults`: three faulty kernels for products in MXFP8: one takes the scale of the neighbouring block,
one keeps sums in bf16 from block to block, one has scales that are normal numbers of fp16. The MERE
of each over that of the right kernel, under learned inputs and under N(0, 1), for forward and input
gradient.

`damage`: Spearman's correlation of MERE and the damage to NE, over products, in each precision.

`cost`: what a snapshot adds to a step (4,096 rows of a DCNv2 as in `vs_fuxictr.py`, one thread),
over 100 steps, in fp32 and in bf16. Snapshots that take weights and those that do not are weighed
as they come.

`dispatch`: forward and backward of this DCNv2 with the recipe that is chosen, over fp32 and over
bf16 throughout, in turns.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from _peers.targets import print_target
from _peers.tiny import sized
from number_formats import _Dcnv2 as Dcnv2
from row_formats import processor
from torch import Tensor

from sparrow import data
from sparrow.apps.generate import generate
from sparrow.apps.numerics.dispatch import recipe_of, verdicts
from sparrow.apps.numerics.measure import (
    PASSES,
    Site,
    compare_precisions,
    damage,
    draw_operands,
    factors,
    gather_sites,
    judges_of,
    standard,
)
from sparrow.core.memory import keep_freed_memory
from sparrow.extensions.low_precision import probe
from sparrow.extensions.low_precision.precision import put_recipes
from sparrow.extensions.low_precision.watch import Operands, watched
from sparrow.features.schema import Split
from sparrow.kernels.flops import product_flops
from sparrow.layers.precision import Precision, computing
from sparrow.layers.precisions.bf16 import lacks_bf16
from sparrow.layers.site import named_sites
from sparrow.numerics.bits import exponents, power
from sparrow.numerics.blocks import rounded
from sparrow.numerics.errors import errors
from sparrow.numerics.formats import FORMATS
from sparrow.trained.run import Run
from sparrow.trained.scorer import restore
from sparrow.training import train

PRECISIONS = sized(("fp8", "mxfp8", "mxfp6", "mx6", "mxfp4"), ("fp8", "mxfp4"))
MODELS = sized(("dcnv2", "wukong"), ("dcnv2",))
NEAR = 1.15  # a factor
LOG = {
    "rows": 300_000,
    "users": 20_000,
    "items": 5_000,
    "zipf": 1.1,
    "categorical": 8,
    "numeric": 6,
    "history": 0,
}
QUICK = LOG | {"rows": sized(40_000, 1_500)}


def quiet(what: str, done: int, total: int) -> None:
    """Tell nobody."""


def runs(work: Path, quick: bool) -> Iterator[tuple[str, Path]]:
    """Names and folders of probed runs; they are trained when they are asked for first."""
    log = work / "log"
    if not log.exists():
        generate(work / "log.parquet", **(QUICK if quick else LOG))
        data.prepare([work / "log.parquet"], log, split=Split(by="time", valid=0.1, test=0.0))
    for model in MODELS:
        for seed in range(1 if quick else 3):
            place = work / f"{model} {seed}"
            if not place.exists():
                leaves: dict[str, Any] = {
                    "run_dir": str(place),
                    "model.name": model,
                    "seed": seed,
                    "threads": 1,
                }
                leaves |= {"data.batch_size": 256 if quick else 512, "log.tensorboard": False}
                train(Run.of(log, leaves), options={"probe"})
            yield f"{model}, seed {seed}", place


@functools.cache
def sites_of(place: Path) -> list[Site]:
    """The products of a run that its probe knows, with the log's operands.

    A quick run is so short that its probe saw too few rows: then all that `gathered` learnt.
    """
    found = restore(place, which="last")
    learned, _ = probe.load_of_run(place)
    sites = gather_sites(found, data.open(found.run.data.path), learned, quiet)
    known = [site for site in sites if site.learned is not None]
    return [site for site in known if site.learned is learned.get(site.name)] or known


# -- inputs ----------------------------------------------------------------------------------------


def merest(of: Operands, which: str) -> dict[str, float]:
    """MERE of a pass in each precision."""
    return {name: one.mere for name, (one, _) in compare_precisions(which, of, PRECISIONS).items()}


def inputs_case(work: Path, quick: bool) -> None:
    """Print how near learned inputs come to the log's own."""
    every: dict[tuple[str, str], list[float]] = {}
    single: dict[tuple[str, str], list[float]] = {}  # factors of one run in one precision
    kinds = ("learned", "weights drawn too", "N(0, 1)")
    print(
        f"{'':<18}{'pass':<17}{'precision':<10}{kinds[0]:>18}{kinds[1]:>20}{kinds[2]:>18}  "
        " (factor, off)"
    )
    for name, place in runs(work, quick):
        sites = sites_of(place)
        for which in PASSES:
            ratios: dict[tuple[str, str], list[float]] = {}
            for site in sites:
                assert site.learned is not None
                real = merest(site.operands, which)
                of_examples = site.learned.has_examples  # two activations are always drawn together
                weight = (
                    None if which != "weight_gradient" and not of_examples else site.operands.weight
                )
                inputs = [
                    draw_operands(site.learned, site.operands.weight, seed=0),
                    draw_operands(site.learned, weight, seed=0), standard(site.operands, seed=1),
                ]  # fmt: skip
                for kind, operands in zip(kinds, inputs, strict=True):
                    for precision, value in merest(operands, which).items():
                        ratio = value / real[precision]
                        every.setdefault(
                            (which, f"{kind}, two activations" if of_examples else kind), []
                        ).append(ratio)
                        if not of_examples:
                            ratios.setdefault((precision, kind), []).append(ratio)
            for precision in PRECISIONS:
                of = [ratios[precision, kind] for kind in kinds]
                cells = "".join(f"{geometric_mean(one):>11.3f} {off(one):>6.3f}" for one in of)
                print(f"{name:<18}{which:<17}{precision:<10}{cells}")
                for kind, one in zip(kinds, of, strict=True):
                    single.setdefault((which, kind), []).append(geometric_mean(one))
    for (which, kind), values in every.items():
        told = (
            f"factor {geometric_mean(values):.3f}, off {off(values):.3f}, {min(values):.2f} to"
            f" {max(values):.2f}"
        )
        print(f"{which:<17}{kind:<34} {told}")
    for kind in kinds[:2]:
        for which in PASSES:
            values, runs_of = every[which, kind], single[which, kind]
            factor, within = (
                geometric_mean(values),
                statistics.fmean(max(one, 1 / one) <= NEAR for one in values),
            )
            at_most(f"MERE, {kind}, {which}, over the log's own", max(factor, 1 / factor), NEAR)
            alone = f"{off(values):.2f} on average, {min(values):.2f} to {max(values):.2f}"
            print(
                f"  of a product alone: off by a factor of {alone}; {100 * within:.0f} % within"
                f" {NEAR}; of a run in one precision: {min(runs_of):.2f} to {max(runs_of):.2f}"
            )


def geometric_mean(ratios: list[float]) -> float:
    """Of positive numbers; NaN of none."""
    return statistics.geometric_mean(ratios) if ratios else math.nan


def off(ratios: list[float]) -> float:
    """By which factor a ratio is away from 1, up or down, on geometric average."""
    return geometric_mean([max(one, 1 / one) for one in ratios])


def at_most(name: str, value: float, goal: float) -> None:
    """A line of a target from above."""
    print_target(name, f"{value:.3f}", f"at most {goal}", value <= goal)


# -- faults ----------------------------------------------------------------------------------------


def by_block(x: Tensor, shift: int = 0, least: int = -127) -> Tensor:
    """MXFP8 along the last axis, with scales of another block, or with scales of 2^least and
    more.
    """
    format = FORMATS["mxfp8"]
    rows, length = x.shape[:-1].numel(), x.shape[-1]
    padded = torch.nn.functional.pad(x.reshape(rows, length), (0, -length % 32)).view(rows, -1, 32)
    exponent = exponents(padded.abs().amax(2, keepdim=True)) - format.element.largest_exponent
    exponent = exponent.clamp(least, 127).roll(shift, 1)
    codes = format.element.codes(padded * power(-exponent), "nearest")
    return (
        (format.element.numbers()[codes] * power(exponent)).view(rows, -1)[:, :length].view(x.shape)
    )


def right(a: Tensor, b: Tensor) -> Tensor:
    """a b^T in MXFP8."""
    return by_block(a) @ by_block(b).mT


def neighbour(a: Tensor, b: Tensor) -> Tensor:
    """With the scale of the block before."""
    return by_block(a, shift=1) @ by_block(b, shift=1).mT


def narrow_sums(a: Tensor, b: Tensor) -> Tensor:
    """With sums that are rounded to bf16 after each block."""
    a, b = by_block(a), by_block(b)
    out = torch.zeros(a.shape[0], b.shape[0])
    for first in range(0, a.shape[1], 32):
        out = (out + a[:, first : first + 32] @ b[:, first : first + 32].mT).bfloat16().float()
    return out


def fp16_scales(a: Tensor, b: Tensor) -> Tensor:
    """With scales that are normal numbers of fp16."""
    return by_block(a, least=-14) @ by_block(b, least=-14).mT


FAULTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "neighbour's scale": neighbour, "sums in bf16": narrow_sums, "scales in fp16": fp16_scales,
}  # fmt: skip


def faults_case(work: Path, quick: bool) -> None:
    """Print what three faults show under learned inputs and under N(0, 1)."""
    x = torch.randn(40, 70)
    assert torch.equal(by_block(x), rounded(x, FORMATS["mxfp8"]))
    print(
        f"{'MERE over the right one':<20}{'pass':<16}{'learned':>9}{'N(0, 1)':>9}   most where N(0,"
        " 1) is below 2.5"
    )
    seen = []
    for fault, multiply in FAULTS.items():
        for which in ("forward", "input_gradient"):
            over: dict[str, tuple[float, float]] = {}
            for name, place in runs(work, quick):
                for site in sites_of(place):
                    assert site.learned is not None
                    if site.learned.has_examples or factors(which, site.operands)[0].shape[1] <= 32:
                        continue  # a single block has no neighbour
                    inputs = (
                        draw_operands(site.learned, site.operands.weight, seed=0),
                        standard(site.operands, seed=1),
                    )
                    pair = [factors(which, of) for of in inputs]
                    exact = [a.double() @ b.double() for a, b in pair]
                    wrong, sound = (
                        [
                            errors(way(a, b.mT), one).mere
                            for (a, b), one in zip(pair, exact, strict=True)
                        ]
                        for way in (multiply, right)
                    )
                    over[f"{name}: {site.name}"] = wrong[0] / sound[0], wrong[1] / sound[1]
            means = [geometric_mean([one[at] for one in over.values()]) for at in (0, 1)]
            quiet_ones = {place: one for place, one in over.items() if one[1] < 2.5}
            place, most = max(
                quiet_ones.items(), key=lambda item: item[1][0], default=("none", (0.0, 0.0))
            )
            print(
                f"{fault:<20}{which:<16}{means[0]:>9.2f}{means[1]:>9.2f}   {most[0]:.1f} and"
                f" {most[1]:.2f}: {place}"
            )
            if most[0] >= 5:
                count = sum(one[0] >= 5 and one[1] < 2.5 for one in over.values())
                told = (
                    f"{count} of {len(over)} products, geometric means of all {means[0]:.2f} and"
                    f" {means[1]:.2f}"
                )
                seen.append(f"{fault}, {which} ({told})")
    claim = "at 5 times under learned inputs and below 2.5 under N(0, 1)"
    print_target(claim, "; ".join(seen) or "none", "one of three faults", bool(seen))


# -- damage ----------------------------------------------------------------------------------------


def ranks(values: list[float]) -> Tensor:
    """Ranks, those of ties averaged."""
    x = torch.tensor(values, dtype=torch.float64)
    return ((x[:, None] > x).sum(1) + ((x[:, None] == x).sum(1) - 1) / 2).double()


def spearman(one: list[float], other: list[float]) -> float:
    """Spearman's correlation; NaN where one of them is constant."""
    both = torch.stack([ranks(one), ranks(other)])
    return float(torch.corrcoef(both)[0, 1])


def damage_case(work: Path, quick: bool) -> None:
    """Print whether MERE tells which products harm NE."""
    assert spearman([1.0, 5.0, 9.0], [2.0, 3.0, 4.0]) == 1.0
    every = []
    for name, place in runs(work, quick):
        sites, found = sites_of(place), restore(place, which="last")
        (judge, _), _ = judges_of(data.open(found.run.data.path), 2_000 if quick else 20_000)
        _, rises = damage(found, [site.name for site in sites], PRECISIONS, judge, quiet)
        for precision in PRECISIONS:
            mere = [merest(site.operands, "forward")[precision] for site in sites]
            harm = [rises[site.name][precision].value for site in sites]
            every.append(spearman(mere, harm))
            most = max(sites, key=lambda site: rises[site.name][precision].value)
            at = sites.index(most)
            print(
                f"{name:<18}{precision:<8} Spearman {every[-1]:+.2f} over {len(sites)} products;"
                f" most harm: {most.name}, {100 * harm[at]:+.4f} % +-"
                f" {100 * rises[most.name][precision].error:.4f}, MERE {mere[at]:.3f}"
            )
    print(f"Spearman of MERE and damage, mean: {statistics.fmean(every):+.2f} (no goal)")


# -- cost and dispatch -----------------------------------------------------------------------------


def step(model: Dcnv2, x: Tensor, precision: Precision) -> list[Tensor]:
    """Gradients of a forward and backward."""
    model.zero_grad()
    with computing(precision, x.device):
        logits = model(x)
    logits.square().mean().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def cost_case(work: Path, quick: bool) -> None:
    """Print what snapshots add to training."""
    rows, turns = (
        sized((1024, 16), (64, 1)) if quick else (4096, 12)
    )  # some whole cycles of snapshots of weights
    units = "without" if lacks_bf16(torch.device("cpu")) else "with"
    print(f"{processor()}, one thread, {units} bf16 units; {rows} rows")
    for name in ("fp32", "bf16"):
        torch.manual_seed(0)
        model, x, precision = Dcnv2(39 * 16), torch.randn(rows, 39 * 16), Precision(name)
        plain = [grad.clone() for grad in step(model, x, precision)]
        watching = probe.Probe(model, rows)
        with watching.at(probe.EVERY - 1):
            assert all(
                torch.equal(one, two)
                for one, two in zip(plain, step(model, x, precision), strict=True)
            )
        assert watching.learned.keys() >= {"cross.weights.0", "deep.layers.0.weight"}
        taken, added = [], []
        for turn in range(1, turns + 1):
            pair = []
            for is_on in (False, True):
                with torch.no_grad():
                    for p in model.parameters():
                        p.add_(torch.randn_like(p) * 1e-3)  # so that weights are seen to move
                start = time.thread_time()
                with watching.at((turn + 1) * probe.EVERY - 1) if is_on else nullcontext():
                    step(model, x, precision)
                pair.append(time.thread_time() - start)
            taken.append(pair[0])
            added.append(pair[1] - pair[0])
        share = statistics.fmean(added) / probe.EVERY / statistics.median(taken)
        print(f"{name}: a step {1e3 * statistics.median(taken):.1f} ms, a snapshot "
              f"{1e3 * statistics.fmean(added):.1f} ms "
              f"on average (median {1e3 * statistics.median(added):.1f})")  # fmt: skip
        at_most(f"cost of the probe in {name}, % of the time of steps", 100 * share, 1.0)


def dispatch_case(work: Path, quick: bool) -> None:
    """Print the speed of the recipe that is chosen."""
    rows, turns = sized((1024, 5), (64, 1)) if quick else (4096, 15)
    torch.manual_seed(0)
    model, x = Dcnv2(39 * 16), torch.randn(rows, 39 * 16)
    seen: dict[str, Operands] = {}
    with watched(model, seen.__setitem__, 1600):
        step(model, x, Precision())
    sites = [
        Site(
            name=name,
            high=name.startswith("head"),
            operands=of,
            learned=None,
            rows_per_example=1.0,
            flops=product_flops(1, *of.weight.shape),
        )
        for name, of in seen.items()
    ]
    with tempfile.TemporaryDirectory() as folder:
        run = Run.of(folder, {"data.batch_size": rows, "threads": 1})
    alone = verdicts(sites, run, quiet)
    for name, of in alone.items():
        print(f"{name}: " + "; ".join(f"{verdict.chosen}: {verdict.why}" for verdict in of))
    auto = recipe_of(alone, {name: of[0].chosen for name, of in alone.items()}, Precision())
    sides = {"auto": auto, "fp32": Precision(), "bf16": Precision("bf16")}
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(turns + 1):
        for name, precision in sides.items():
            for site in named_sites(model).values():
                site.recipe = None
            put_recipes(model, precision)
            start = time.thread_time()
            step(model, x, precision)
            if turn:
                taken[name].append(time.thread_time() - start)
    over = {
        name: statistics.median(a / b for a, b in zip(taken["auto"], taken[name], strict=True))
        for name in sides
    }
    ms = 1e3 * statistics.median(taken["auto"])
    print(f"auto {ms:.1f} ms a step: {over['fp32']:.3f} of fp32, {over['bf16']:.3f} of bf16")
    at_most("auto over the better one of fp32 and bf16", max(over["fp32"], over["bf16"]), 1.02)


CASES = {
    "inputs": inputs_case,
    "faults": faults_case,
    "cost": cost_case,
    "dispatch": dispatch_case,
    "damage": damage_case,
}


def main() -> None:
    """Run the cases."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="a small log, one seed and less time, the same checks"
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument(
        "--work",
        type=Path,
        help="a folder for log and runs, which are used again if they are there",
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    with tempfile.TemporaryDirectory() as folder:
        work = options.work or Path(folder)
        work.mkdir(parents=True, exist_ok=True)
        for case in options.cases:
            print(f"-- {case}")
            CASES[case](work, options.quick)


if __name__ == "__main__":
    main()
