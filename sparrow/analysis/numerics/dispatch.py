"""Which candidate computes each pass of each product: the fastest one that is near enough (LoKA, arXiv 2605.10886)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparrow.analysis.bits.search import Choice, Part, Rise, Scores, rises, search
from sparrow.analysis.judge import Judge
from sparrow.analysis.numerics.measure import PASSES, Site, drawn, errors, factors, told
from sparrow.core.config import to_dict, write_toml
from sparrow.core.progress import Progress
from sparrow.layers import Precision
from sparrow.layers.candidates import Candidate, candidates
from sparrow.layers.recipe import Recipe
from sparrow.layers.watch import Operands
from sparrow.trained.run import Run
from sparrow.trained.scorer import Restored
from sparrow.training.preflight import threads_given_back

MOST_MERE, LEAST_SPEEDUP = 0.2, 1.05
HIGH = "fp32"
BETWEEN = "bf16"  # the precision that says what stands between products, where any of them is not HIGH
SECONDS, LEAST_TURNS, MOST_TURNS = 0.2, 3, 15  # of timing a pass


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Who computes a pass of a product.

    chosen: the candidate. why: in words. allowed: those that are near enough and faster than fp32, the fastest first.
    milliseconds: candidate -> time of the pass for a batch, conversions included; of those that are available.
    mere: candidate -> the larger one of its errors under real and under learned inputs.
    """

    chosen: str
    why: str
    allowed: tuple[str, ...]
    milliseconds: Mapping[str, float]
    mere: Mapping[str, float]


def judged(milliseconds: Mapping[str, float], mere: Mapping[str, float], missing: Mapping[str, str]) -> Verdict:
    """Returns the fastest candidate whose MERE is below MOST_MERE and that is LEAST_SPEEDUP times as fast as fp32.

    Args:
        milliseconds: of candidates that are available, fp32 among them.
        mere: of the same.
        missing: why others are not available.
    """
    speed = {name: milliseconds[HIGH] / ms for name, ms in milliseconds.items() if name != HIGH}
    near = {name for name in speed if mere[name] < MOST_MERE}
    fast = {name for name in speed if speed[name] >= LEAST_SPEEDUP}
    allowed = tuple(sorted((name for name in speed if name in near & fast), key=lambda name: milliseconds[name]))
    told = [f"{name}: {why}" for name, why in missing.items()]
    told += [f"{name}: MERE {mere[name]:.2g}, {MOST_MERE} is too much" for name in speed if name not in near]
    told += [
        f"{name}: {speed[name]:.2f} times as fast, {LEAST_SPEEDUP} is the least"
        for name in speed
        if name in near - fast
    ]
    if allowed:
        told.insert(0, f"{speed[allowed[0]]:.2f} times as fast as {HIGH}, MERE {mere[allowed[0]]:.2g}")
    chosen = allowed[0] if allowed else HIGH
    return Verdict(chosen=chosen, why="; ".join(told), allowed=allowed, milliseconds=milliseconds, mere=mere)


def verdicts(sites: Sequence[Site], run: Run, progress: Progress) -> dict[str, list[Verdict]]:
    """Returns site -> a verdict for each pass, each product by itself. Sites that stay high have none.

    Args:
        sites: what is known of them.
        run: its settings: products are those of its steps, on its device and threads.
        progress: is told how far it is.
    """
    every, device = candidates(), torch.device(run.device)
    missing = {name: why for name, one in every.items() if (why := one.missing(device))}
    there = {name: one for name, one in every.items() if name not in missing}
    found: dict[str, list[Verdict]] = {}
    low = [site for site in sites if not site.high]
    for number, site in enumerate(low):
        progress("candidates timed", number, len(low))
        inputs = [site.operands]
        if site.learned is not None:
            inputs.append(drawn(site.learned, site.operands.weight, seed=0))
        wholes = [_whole(of, site.each, run.data.batch_size, device) for of in inputs]
        sizes = list(zip(inputs, wholes, strict=True))
        found[site.name] = []
        for which in PASSES:
            fitting = {name: one for name, one in there.items() if one.takes(*factors(which, wholes[0]))}
            absent = missing | {name: "its units do not take these sizes" for name in there if name not in fitting}
            with threads_given_back():
                torch.set_num_threads(run.threads or torch.get_num_threads())
                taken = milliseconds(wholes[0], which, fitting)
            mere = {name: [_mere(one, which, of, device) for of in sizes] for name, one in fitting.items()}
            worst = {name: float(torch.tensor(each).max()) for name, each in mere.items()}  # of NaN, NaN
            found[site.name].append(judged(taken, worst, absent))
    progress("candidates timed", len(low), len(low))
    return found


def _mere(one: Candidate, which: str, of: Sequence[Operands], device: torch.device) -> float:
    """Returns the error of what a candidate computes.

    of: operands of several sizes, of which those count that its units take first.
    """
    a, b = next(pair for pair in (factors(which, some) for some in of) if one.takes(*pair))
    out = one.multiply(a.to(device), b.to(device))
    return errors(out.cpu(), (a.double() @ b.double()).cpu()).mere


def _whole(of: Operands, each: float, batch_size: int, device: torch.device) -> Operands:
    """Returns the same rows, again and again, in the shapes that a batch has. each: rows of an example."""
    x, weight, grad = of[:3]
    if of.of_examples:
        x, weight, grad = (one[torch.arange(batch_size) % len(one)] for one in (x, weight, grad))
    elif weight.dim() == 2:
        rows = max(1, round(each * batch_size))
        x, grad = (one[torch.arange(rows) % len(one)] for one in (x, grad))
    # with several weights at once they have a batch's rows already
    return Operands(x.to(device), weight.to(device), grad.to(device), len(x), of.of_examples)


def milliseconds(of: Operands, which: str, there: Mapping[str, Candidate]) -> dict[str, float]:
    """Returns the median time of a pass by each candidate. They take turns."""
    a, b = factors(which, of)
    taken: dict[str, list[float]] = {name: [] for name in there}
    for one in there.values():
        _timed(one.multiply, a, b)
    begun = time.perf_counter()
    for turn in range(MOST_TURNS):
        if turn >= LEAST_TURNS and time.perf_counter() - begun > SECONDS:
            break
        for name, one in there.items():
            taken[name].append(_timed(one.multiply, a, b))
    return {name: 1e3 * statistics.median(times) for name, times in taken.items()}


def _timed(multiply: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor) -> float:
    begun = time.perf_counter()
    multiply(a, b)
    if a.device.type == "cuda":
        torch.cuda.synchronize(a.device)
    return time.perf_counter() - begun


# -- all together ------------------------------------------------------------------------------------------------------


def within_budget(
    found: Restored, alone: Mapping[str, Sequence[Verdict]], judges: tuple[Judge, Judge], budget: float,
    progress: Progress,
) -> tuple[Precision, Rise | None]:  # fmt: skip
    """Returns a precision in which NE is shown to rise by no more than a budget, and by how much it rises.

    The rise is of other rows than those that have chosen, because the first of many that keeps to a budget is a lucky
    one. It is None where all stays fp32.

    What computes the forward of each product begins with the fastest candidate that is allowed, and the most harmful
    get the next one, see `search`. NE does not tell what gradients in fewer bits do, so theirs stay.

    Args:
        found: the model.
        alone: see `verdicts`.
        judges: have the rows by which to choose, and others.
        budget: how much NE may rise, as a share of it.
        progress: is told how far it is.
    """
    parts = {
        site: Part(kind="product", name=site, steps=(*of[0].allowed, HIGH))
        for site, of in alone.items()
        if of[0].allowed
    }

    def precision(choice: Choice) -> Precision:
        forward = {part.name: name for part, name in choice.items()}
        return recipe_of(alone, forward, found.run.precision)

    def scores(choice: Choice) -> Scores:
        return told(found, precision(choice))

    if not parts:
        return precision({}), None
    chooses, checks = judges
    with torch.inference_mode():
        best = search(list(parts.values()), scores, chooses, budget, progress).best.choice
        rise = rises(*(checks.ne_of(scores(choice)) for choice in ({}, best))) if best else None
    told(found, found.run.precision)
    return precision(best), rise


def recipe_of(alone: Mapping[str, Sequence[Verdict]], forward: Mapping[str, str], like: Precision) -> Precision:
    """Returns a precision that has every product computed by the candidates that were chosen.

    What stands between two products is bf16 then. Else conversions would take more time than candidates save.

    Args:
        alone: site -> verdicts.
        forward: site -> the candidate of its forward; fp32 of others. Where no forward has another one, there is
            nothing narrow between products, and gradients are fp32 too.
        like: how dense weights are kept.
    """
    if all(name == HIGH for name in forward.values()):
        return Precision(weights=like.weights)
    known, sites = candidates(), {}
    for site, of in alone.items():
        names = [forward.get(site, HIGH), *(verdict.chosen for verdict in of[1:])]
        sites[site] = Recipe(**{which: known[name].FORMATS for which, name in zip(PASSES, names, strict=True)})
    return Precision(BETWEEN, sites, like.weights)


def as_in_recipe(alone: Mapping[str, Sequence[Verdict]], precision: Precision) -> dict[str, list[Verdict]]:
    """Returns verdicts with what computes each pass in a recipe, and why where that is not what was chosen alone.

    Args:
        alone: see `verdicts`.
        precision: what `within_budget` made of them.
    """
    found, names = {}, {one.FORMATS: name for name, one in candidates().items()}
    high = Recipe.of(HIGH)
    for site, of in alone.items():
        chosen = [names[formats[0], formats[1]] for formats in precision.sites.get(site, high).passes]
        whys = [f"the budget of NE leaves {of[0].chosen} out", *[f"all forwards are {HIGH}"] * (len(of) - 1)]
        found[site] = [
            one if one.chosen == name else replace(one, chosen=name, why=f"{why}; {one.why}")
            for one, name, why in zip(of, chosen, whys, strict=True)
        ]
    return found


def as_file(precision: Precision, told: str) -> str:
    """Returns a recipe file that `--precision FILE` reads. told: a line about it."""
    of = to_dict(precision)
    return write_toml({"default": of["name"], "weights": of["weights"], "sites": of["sites"]}, header=told)
